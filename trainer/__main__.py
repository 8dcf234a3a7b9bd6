"""One rank of a training run: `python -m trainer RUN_DIR/config.yaml`, started by a launcher."""

import faulthandler
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from trainer.config import TrainerInput
from trainer.errors import ForgelineError, OutOfMemoryError
from trainer.launcher import FAILURE
from trainer.processes import end_with_parent

_NEEDLESS = ("boto3", "mlflow", "pandas", "scipy", "torchvision")
"""What DeepSpeed, transformers and accelerate import in passing where they find it, and no rank uses."""


def main(config: Path) -> int:
    """Run this rank; returns its exit code. A failure is described in the run directory."""
    for name in _NEEDLESS:
        sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed
    end_with_parent(signal.SIGKILL)  # no orphan of a dead launcher goes on writing
    settings = TrainerInput.read(config)
    _redirect_output(settings.run_dir / "logs" / f"rank-{os.environ['RANK']}.log")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        import torch

        from trainer.engine import start_process_group
        from trainer.loop import train

        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        start_process_group(device)
        try:
            train(settings, device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{settings.name}: micro_batch={settings.micro_batch} does not fit: {error}"
            ) from error
        torch.distributed.destroy_process_group()
        return 0
    except ForgelineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        _describe_failure(settings.run_dir, error)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return 1


def _redirect_output(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _describe_failure(run_dir: Path, error: ForgelineError) -> None:
    """Leave the cause for whoever started the launcher; the first rank to fail names it."""
    try:
        with open(run_dir / FAILURE, "x", encoding="utf-8") as file:
            json.dump({"error": type(error).__name__, "message": str(error), "rank": os.environ["RANK"]}, file)
    except FileExistsError:
        pass


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # skips the interpreter's slow teardown of torch; everything durable is already on the disk
    os._exit(code)
