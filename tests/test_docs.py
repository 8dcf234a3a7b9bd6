"""The documents say what the code does."""

import re
from pathlib import Path

from flows.config import PRESETS, describe_config, json_schema

ROOT = Path(__file__).resolve().parent.parent


def test_the_configuration_reference_is_what_the_command_prints() -> None:
    assert (ROOT / "docs" / "configure.md").read_text() == describe_config() + "\n", "run: make docs"
    assert (ROOT / "docs" / "config.schema.json").read_text() == json_schema() + "\n", "run: make docs"


def test_every_file_that_the_documents_link_exists() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_readme_names_every_preset() -> None:
    text = (ROOT / "README.md").read_text()
    for preset in PRESETS.glob("*.yaml"):
        assert preset.stem in text, preset.stem
