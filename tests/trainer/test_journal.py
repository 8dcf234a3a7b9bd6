"""The journal: it only grows, every step is in it once, and a torn line does no harm."""

import json
import os

import pytest

from trainer.journal import Journal, read_records


def steps_in(path) -> list[int]:
    return [record["step"] for record, _ in read_records(path) if "step" in record]


def write(path, *steps: int) -> Journal:
    journal = Journal(path)
    for step in steps:
        journal.record(step, {"train/loss": 1.0 / step})
    return journal


def test_records_are_one_json_object_a_line_and_come_back_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    journal = write(path, 1, 2)
    journal.event("resumed", step_of_checkpoint=2, note="é\n")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record for record, _ in read_records(path)] == lines
    assert lines[0]["train/loss"] == 1.0
    assert lines[2]["event"] == "resumed"
    assert lines[2]["note"] == "é\n"
    assert all(record["time"] > 1.7e9 for record in lines)


def test_a_record_is_in_the_file_when_record_returns(tmp_path):
    write(tmp_path / "metrics.jsonl", 1)
    assert steps_in(tmp_path / "metrics.jsonl") == [1]


def test_steps_that_run_twice_after_a_resume_are_recorded_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, 4)
    before = path.read_bytes()
    again = write(path, 3, 4)
    assert path.read_bytes() == before
    again.record(5, {"train/loss": 0.5})
    write(path, 4, 5, 6)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]


def test_of_a_step_that_was_cut_off_the_metrics_that_are_missing_are_recorded(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    again = write(path, 2)
    again.record(2, {"train/loss": 0.5, "validation/loss": 0.6})
    last = [record for record, _ in read_records(path)][-1]
    assert steps_in(path) == [1, 2, 2]
    assert last["validation/loss"] == 0.6 and "train/loss" not in last


@pytest.mark.parametrize("torn", [b"{", b'{"step": 3, "tra', b'{"step": 3}', b"\x00\x00\x00", b"\xff"])
def test_a_torn_last_line_is_not_read_and_is_gone_after_reopening(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert steps_in(path) == [1, 2]
    write(path, 3)
    assert path.read_bytes().startswith(whole)
    assert steps_in(path) == [1, 2, 3]


def test_a_journal_cut_off_at_any_byte_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        write(path, 1, 2, 3)
        assert steps_in(path) == [1, 2, 3]


def test_reading_goes_on_from_the_offset_of_any_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3)
    offsets = [0, *(end for _, end in read_records(path))]
    assert offsets[-1] == os.path.getsize(path)
    for number, offset in enumerate(offsets):
        assert [record["step"] for record, _ in read_records(path, offset)] == [1, 2, 3][number:]


def test_a_journal_that_is_not_there_yet_has_no_records_and_it_knows_its_size(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert list(read_records(path)) == []
    assert write(path, 1).size == os.path.getsize(path)
    assert Journal(path).size == os.path.getsize(path)
