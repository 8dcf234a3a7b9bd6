"""Remote sources: what a URL names is found, copied once, and fetched again when it has changed."""

import gzip
import os
import shutil
import socketserver
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tasks.home import Home
from tasks.reading import Reading, read_documents
from tasks.sources import SourceConfig, SourceFile, resolve
from trainer.errors import DataError, MachineError


def files(work: Home, *sources: Any) -> list[SourceFile]:
    return resolve(work, [SourceConfig.model_validate(source) for source in sources], "data.sources")


def texts(work: Home, *sources: Any) -> dict[str, str]:
    return {file.name: file.path.read_text() for file in files(work, *sources)}


def make(path: Path, content: str | bytes = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def copies(work: Home) -> int:
    return sum(path.is_file() and path.name != "origin.json" for path in (work.path / "downloads").rglob("*"))


class Handler(SimpleHTTPRequestHandler):
    """Serves a directory and notes what was asked for."""

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        self.server.requests.append(f"{self.command} {self.path} {int(code)}")

    def log_message(self, *_: Any) -> None:
        pass

    def copyfile(self, source: Any, outputfile: Any) -> None:
        outputfile.write(source.read(self.server.cut_after))


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(directory)))
        self.requests: list[str] = []
        self.cut_after = -1
        """Bytes after which an answer breaks off; -1 for none."""
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()

    def downloads(self) -> int:
        return sum(request.startswith("GET") and request.endswith("200") for request in self.requests)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "www").mkdir()
    serving = Server(tmp_path / "www")
    yield serving
    serving.end()


# --- one file ------------------------------------------------------------------------------------


def test_a_remote_file_is_fetched_once_and_again_when_it_has_changed(work, server, tmp_path):
    page = make(tmp_path / "www" / "a.txt", "one")
    url = f"{server.url}/a.txt"
    assert [texts(work, url) for _ in range(3)] == [{"a.txt": "one"}] * 3
    assert server.downloads() == 1
    page.write_text("two")
    os.utime(page, (1e9, 1e9))
    assert texts(work, url) == {"a.txt": "two"}, "the same size, another time"
    page.write_text("longer")
    os.utime(page, (1e9, 1e9))
    assert texts(work, url) == {"a.txt": "longer"}, "the same time, another size"
    assert server.downloads() == 3
    assert copies(work) == 1, "older versions are removed"


def test_the_copy_of_a_remote_file_is_used_when_the_server_is_gone(work, tmp_path):
    for name in "ab":
        make(tmp_path / "www" / f"{name}.txt", name)
    serving = Server(tmp_path / "www")
    sources = [f"{serving.url}/a.txt", f"{serving.url}/"]
    before = files(work, *sources)
    serving.end()
    assert files(work, *sources) == before
    assert texts(work, sources[1]) == {"a.txt": "a", "b.txt": "b"}
    before[0].path.unlink()
    with pytest.raises(DataError, match="cannot be fetched"):
        files(work, sources[0])


def test_a_remote_file_that_cannot_be_had_is_refused_with_its_remedy(work, server, tmp_path):
    with pytest.raises(DataError, match=r"data.sources\[0\]: http://.*cannot be fetched.*name a copy"):
        files(work, f"{server.url}/missing.txt")
    server.end()
    with pytest.raises(DataError, match="cannot be fetched"):
        files(work, f"{server.url}/other.txt")
    with pytest.raises(DataError, match="nonsense://x"):
        files(work, "nonsense://x/a.txt")


@pytest.mark.parametrize("query", ["", "?download=true", "#part", "?a=b/c.txt", "?q=*"])
def test_the_suffix_of_a_remote_file_counts_without_its_query(work, server, tmp_path, query):
    make(tmp_path / "www" / "sub" / "a.jsonl.gz", gzip.compress(b'{"text": "remote"}\n'))
    (file,) = files(work, f"{server.url}/sub/a.jsonl.gz{query}")
    assert file.name == "a.jsonl.gz"
    assert [(item.name, item.text) for item in read_documents(file, Reading())] == [("a.jsonl.gz:1", "remote")]


def test_a_copy_that_breaks_off_is_never_taken_for_the_file(work, server, tmp_path):
    make(tmp_path / "www" / "a.txt", "x" * 1000)
    server.cut_after = 500
    with pytest.raises(DataError, match="cannot be fetched"):
        files(work, f"{server.url}/a.txt")
    server.cut_after = -1
    assert texts(work, f"{server.url}/a.txt") == {"a.txt": "x" * 1000}
    assert copies(work) == 1


def test_two_remote_files_of_one_name_do_not_meet(work, server, tmp_path):
    make(tmp_path / "www" / "x" / "a.txt", "one")
    make(tmp_path / "www" / "y" / "a.txt", "two")
    urls = [f"{server.url}/{place}/a.txt" for place in "xyx"]
    assert [file.path.read_text() for file in files(work, *urls)] == ["one", "two", "one"]


def test_a_machine_that_refuses_the_copy_is_not_taken_for_the_networks_fault(work, server, tmp_path):
    make(tmp_path / "www" / "a.txt", "one")
    (work.path / "downloads").touch()
    with pytest.raises(MachineError, match="downloads: cannot be written"):
        files(work, f"{server.url}/a.txt")


# --- directories and patterns --------------------------------------------------------------------


@pytest.fixture(params=["http", "memory", "local", "s3"])
def remote(request, tmp_path, monkeypatch) -> Iterator[tuple[str, Any]]:
    """The URL of a directory on a file system, and a function that writes a text below it."""
    kind = request.param
    if kind == "memory":
        filesystem = fsspec.filesystem("memory")
        yield "memory://corpus", lambda name, text: filesystem.pipe(f"/corpus/{name}", text.encode())
        filesystem.rm("/corpus", recursive=True)
    elif kind == "s3":
        s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
        moto = pytest.importorskip("moto.server", reason="moto, the S3 server, is not installed")
        serving = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        serving.start()
        address, port = serving.get_host_and_port()
        names = {"ENDPOINT_URL": f"http://{address}:{port}", "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}
        for name, value in names.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        s3fs.S3FileSystem.clear_instance_cache()
        filesystem = s3fs.S3FileSystem()
        filesystem.mkdir("bucket")
        yield "s3://bucket/corpus", lambda name, text: filesystem.pipe(f"bucket/corpus/{name}", text.encode())
        s3fs.S3FileSystem.clear_instance_cache()
        serving.stop()
    else:
        (tmp_path / "www").mkdir()
        serving = Server(tmp_path / "www")
        url = serving.url if kind == "http" else f"file://{tmp_path}/www"
        yield url, lambda name, text: make(tmp_path / "www" / name, text)
        serving.end()


def test_directories_and_patterns_name_files_that_follow_the_remote_ones(work, remote):
    url, write = remote
    everything = {"a.txt": "a", "b.md": "b", "sub/c.txt": "c", "sub/deep/d.txt": "d"}
    for name, text in everything.items():
        write(name, text)
    assert texts(work, f"{url}/") == everything
    assert texts(work, f"{url}/*.txt") == {"a.txt": "a"}
    assert texts(work, f"{url}/**/*.txt") == {name: text for name, text in everything.items() if name != "b.md"}
    assert texts(work, f"{url}/sub/*") == {"c.txt": "c"}
    assert texts(work, f"{url}/sub/c.txt") == {"c.txt": "c"}
    assert texts(work, {"path": f"{url}/", "exclude": ["*/deep/*", "*.md"]}) == {"a.txt": "a", "sub/c.txt": "c"}

    before = files(work, f"{url}/")
    assert files(work, f"{url}/") == before
    write("sub/c.txt", "changed")
    write("e.txt", "new")
    after = {file.name: file for file in files(work, f"{url}/")}
    assert after.keys() == {*everything, "e.txt"}
    assert [file.identity() == after[file.name].identity() for file in before] == [True, True, False, True]
    assert [file.path == after[file.name].path for file in before] == [True, True, False, True], "fetched again"
    assert after["sub/c.txt"].path.read_text() == "changed"
    with pytest.raises(DataError, match=r"data.sources\[0\]: .*/none/\*.txt cannot be fetched"):
        files(work, f"{url}/none/*.txt")


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_file_system_that_is_not_installed_is_named_with_its_package(work, monkeypatch, scheme):
    package = {"s3": "s3fs", "gs": "gcsfs"}[scheme]
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"data.sources\[0\]: {scheme}://bucket/\*.txt: .*{package}"):
        files(work, f"{scheme}://bucket/*.txt")


def test_a_name_with_a_patterns_signs_is_that_file_where_there_is_one(work):
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/odd/a[1]?.txt", b"odd")
    assert texts(work, "memory://odd/a[1]?.txt") == {"a[1]?.txt": "odd"}
    filesystem.rm("/odd", recursive=True)


def test_copies_that_the_disk_cannot_hold_are_refused_before_anything_is_fetched(work, server, tmp_path):
    with open(make(tmp_path / "www" / "a.txt"), "wb") as file:
        file.truncate(shutil.disk_usage(tmp_path).free + 2**40)  # a hole, which takes no room here
    with pytest.raises(MachineError, match=r"copies of http.* need .* GiB and .* GiB are free"):
        files(work, f"{server.url}/a.txt")
    assert server.downloads() == 0
