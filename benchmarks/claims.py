"""The form of every benchmark: claims measured in one run, printed as a table or as one JSON object."""

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version


@dataclass(frozen=True)
class Claim:
    """One figure and the bound that it has to keep."""

    name: str
    value: float
    bound: float
    against: str
    """What it is compared with."""
    unit: str
    at_most: bool = True
    """Whether the bound is an upper one."""

    @property
    def holds(self) -> bool:
        """Whether the figure keeps its bound."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound


def finish(claims: list[Claim], packages: tuple[str, ...], as_json: bool, **details: object) -> int:
    """Print the claims; the exit code is 1 where one does not hold."""
    if as_json:
        result = {
            "claims": [{**asdict(claim), "holds": claim.holds} for claim in claims],
            **details,
            "machine": {
                "cpu_count": os.cpu_count(),
                "machine": platform.machine(),
                "python": platform.python_version(),
            },
            "versions": {package: version(package) for package in packages},
        }
        print(json.dumps(result))
    else:
        for claim in claims:
            sign = "<=" if claim.at_most else ">="
            mark = "holds" if claim.holds else "FAILS"
            print(f"{claim.name}: {claim.value:.4g} {claim.unit} ({sign} {claim.bound:g}, {claim.against}): {mark}")
        for name, value in details.items():
            print(f"{name}: {value}")
    return 0 if all(claim.holds for claim in claims) else 1


def note(text: str) -> None:
    """Say on stderr what is being measured."""
    print(text, file=sys.stderr, flush=True)
