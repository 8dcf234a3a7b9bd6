"""Durable files: complete or absent, proven by a manifest, locked only by the living, and clear when a disk refuses."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import python_process
from trainer.durable import (
    complete_directory,
    discard,
    exclusive,
    explained,
    faults,
    hash_file,
    read_manifest,
    write_file,
    write_json,
)
from trainer.errors import MachineError

REPOSITORY = Path(__file__).parents[2]
HOLD = """
import sys
from pathlib import Path
from trainer.durable import exclusive
with exclusive(Path(sys.argv[1]), lambda: print("waiting", flush=True)):
    print("held", flush=True)
    sys.stdin.read()
"""
BUILD = """
import sys
from pathlib import Path
from trainer.durable import complete_directory
with complete_directory(Path(sys.argv[1]), {}) as directory:
    (directory / "part").write_text("half of it")
    (directory / "sub").mkdir()
    (directory / "sub" / "part").write_text("half of it")
    print("building", flush=True)
    sys.stdin.read()
"""


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def build(final: Path, text: str = "content") -> Path:
    with complete_directory(final, {"kind": "thing"}) as directory:
        (directory / "sub").mkdir()
        (directory / "a.txt").write_text(text)
        (directory / "sub" / "b.bin").write_bytes(bytes(range(256)))
    return final


@contextmanager
def small_disk(place: Path, kilobytes: int = 64) -> Iterator[Path]:
    """A real file system that is soon full."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"needs to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_finished_directory_has_its_manifest_and_nothing_beside_it(tmp_path):
    final = build(tmp_path / "out")
    manifest = read_manifest(final)
    assert manifest["kind"] == "thing"
    assert {entry["path"]: entry["size"] for entry in manifest["files"]} == {"a.txt": 7, "sub/b.bin": 256}
    assert all(entry["sha256"] == hash_file(final / entry["path"]) for entry in manifest["files"])
    assert faults(final) == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_added_to_the_content_inside_the_block_is_in_the_manifest(tmp_path):
    content: dict[str, object] = {"kind": "thing"}
    with complete_directory(tmp_path / "out", content):
        content["late"] = [1, "é"]
    assert read_manifest(tmp_path / "out")["late"] == [1, "é"]


def test_a_kill_in_the_middle_leaves_nothing_under_the_final_name_and_a_later_build_works(tmp_path):
    final = tmp_path / "out"
    with python_process(BUILD, final) as builder:
        assert builder.stdout.readline() == "building\n"
        assert not final.exists()
        kill(builder)
    assert not final.exists()
    build(final)
    assert faults(final) == []
    assert not (final / "part").exists(), "nothing of the killed build is left in it"
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nor beside it"


def test_a_kill_while_rebuilding_leaves_the_old_directory_as_it_was(tmp_path):
    final = build(tmp_path / "out", "old")
    with python_process(BUILD, final) as builder:
        assert builder.stdout.readline() == "building\n"
        kill(builder)
    assert (final / "a.txt").read_text() == "old"
    assert faults(final) == []


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_an_error_in_the_middle_leaves_nothing(tmp_path, error):
    with pytest.raises(type(error)), complete_directory(tmp_path / "out", {}) as directory:
        (directory / "a.txt").write_text("half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_new_build_replaces_the_old_one_whole(tmp_path):
    build(tmp_path / "out", "old")
    with complete_directory(tmp_path / "out", {}) as directory:
        (directory / "other").write_text("new")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", "other"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("place", [0, 100, 255])
def test_a_flipped_bit_is_found(tmp_path, place):
    final = build(tmp_path / "out")
    flip(final / "sub" / "b.bin", place)
    assert faults(final) == [f"{final / 'sub/b.bin'}: content differs from its checksum"]


@pytest.mark.parametrize("size", [0, 1, 255, 300])
def test_another_length_is_found(tmp_path, size):
    final = build(tmp_path / "out")
    os.truncate(final / "sub" / "b.bin", size)
    assert faults(final) == [f"{final / 'sub/b.bin'}: {size} bytes, the manifest says 256"]


def test_a_missing_file_is_found(tmp_path):
    final = build(tmp_path / "out")
    (final / "a.txt").unlink()
    assert faults(final) == [f"{final / 'a.txt'}: No such file or directory"]


def test_every_fault_is_listed(tmp_path):
    final = build(tmp_path / "out")
    (final / "a.txt").unlink()
    flip(final / "sub" / "b.bin", 9)
    assert len(faults(final)) == 2


def test_a_flipped_bit_anywhere_in_the_manifest_is_found(tmp_path):
    final = build(tmp_path / "out")
    whole = (final / "manifest.json").read_text()
    for place, symbol in enumerate(whole):
        if symbol.isalnum():
            flip(final / "manifest.json", place)
            assert faults(final), f"{whole[:place]}→{whole[place:]}"
            (final / "manifest.json").write_text(whole)
    assert faults(final) == []


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "7", '{"files": 3}', "{}", '{"kind": "thing"}', "\x00" * 50]
)
def test_a_manifest_that_is_none_is_a_fault_and_no_crash(tmp_path, content):
    final = build(tmp_path / "out")
    (final / "manifest.json").write_text(content)
    assert len(faults(final)) == 1
    (final / "manifest.json").unlink()
    assert faults(final) == [f"{final / 'manifest.json'}: missing or unreadable"]


def test_discarding_leaves_nothing_and_discarding_nothing_is_fine(tmp_path):
    discard(build(tmp_path / "out"))
    discard(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_waits_for_the_lock_and_gets_it_when_the_owner_is_killed(tmp_path):
    lock = tmp_path / "locks" / "one"
    with python_process(HOLD, lock) as first, python_process(HOLD, lock) as second:
        said = {first.stdout.readline(): first, second.stdout.readline(): second}
        assert set(said) == {"held\n", "waiting\n"}
        kill(said["held\n"])
        assert said["waiting\n"].stdout.readline() == "held\n"


def test_the_lock_of_a_killed_owner_is_free_at_once_and_also_for_ever_after(tmp_path):
    with python_process(HOLD, tmp_path / "one") as owner:
        assert owner.stdout.readline() == "held\n"
        kill(owner)
    for _ in range(2):
        with exclusive(tmp_path / "one", lambda: pytest.fail("it waits for a dead owner")):
            pass


def test_a_lock_is_released_after_an_error_and_different_locks_do_not_meet(tmp_path):
    with pytest.raises(ValueError, match="bad"), exclusive(tmp_path / "one"):
        raise ValueError("bad")
    with exclusive(tmp_path / "one"), exclusive(tmp_path / "two", lambda: pytest.fail("another lock")):
        pass


def test_a_child_process_does_not_keep_its_parents_lock(tmp_path):
    with exclusive(tmp_path / "one"):
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False)
    with exclusive(tmp_path / "one", lambda: pytest.fail("a child holds it")):
        child.communicate()


def test_a_written_file_is_the_old_or_the_new_one_and_has_no_rest_beside_it(tmp_path):
    write_file(tmp_path / "a", "old")
    write_file(tmp_path / "a", "new é")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "new é"
    write_json(tmp_path / "b", {"é": [1]})
    assert json.loads((tmp_path / "b").read_text(encoding="utf-8")) == {"é": [1]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_failed_write_leaves_the_old_file_and_no_partial(tmp_path):
    write_file(tmp_path / "a", "old")
    with pytest.raises(UnicodeEncodeError):
        write_file(tmp_path / "a", "new \ud800")
    with pytest.raises(TypeError):
        write_json(tmp_path / "a", object())
    assert (tmp_path / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_named_with_its_remedy_and_leaves_what_was_there(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        write_file(disk / "a", "old")
        with pytest.raises(MachineError, match=f"{disk / 'a'}: the disk is full. Free space"):
            write_file(disk / "a", "x" * 100_000)
        assert (disk / "a").read_text() == "old"
        with (
            pytest.raises(MachineError, match=f"{disk / 'out'}: the disk is full"),
            complete_directory(disk / "out", {}) as directory,
        ):
            (directory / "big").write_bytes(bytes(100_000))
        assert [path.name for path in disk.iterdir()] == ["a"]
        build(disk / "out")
        assert faults(disk / "out") == []


def test_a_read_only_disk_is_named_with_its_remedy(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for refused in (
            lambda: write_file(disk / "a", "x"),
            lambda: exclusive(disk / "lock").__enter__(),
            lambda: build(disk / "out"),
        ):
            with pytest.raises(MachineError, match=r"cannot be written .*Set FORGELINE_HOME"):
                refused()


def test_a_path_below_a_file_is_named_with_its_remedy(tmp_path):
    (tmp_path / "file").touch()
    for refused in (
        lambda: write_file(tmp_path / "file" / "a", "x"),
        lambda: exclusive(tmp_path / "file" / "lock").__enter__(),
        lambda: build(tmp_path / "file" / "out"),
    ):
        with pytest.raises(MachineError, match=r"cannot be written .*Set FORGELINE_HOME"):
            refused()


def test_other_errors_are_not_taken_for_the_disks():
    with pytest.raises(FileNotFoundError), explained(Path("x")):
        raise FileNotFoundError(2, "No such file")
