"""The download: complete, continued, refused; against a server on this machine and made-up archives."""

import hashlib
import io
import logging
import stat
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pointproj.data import download
from pointproj.data.download import Archive, DownloadError, download_modelnet10, unpack
from pointproj.data.errors import DataError

TRIANGLE = b"OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 2\n"
GOOD = {
    "ModelNet10/README.txt": b"about",
    "ModelNet10/chair/train/chair_0001.off": TRIANGLE,
    "ModelNet10/chair/test/chair_0890.off": TRIANGLE,
}
JUNK = {
    "__MACOSX/ModelNet10/._README.txt": b"fork",
    "ModelNet10/chair/train/._chair_0001.off": b"fork",
    "ModelNet10/chair/.DS_Store": b"finder",
    "elsewhere/file.txt": b"not the folder",
}


def zipped(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def unpacked(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


class Server:
    """Serves one file; can break off early and ignore ranges."""

    def __init__(self, content):
        self.content = content
        self.break_after = None
        self.ranges = True
        self.status = None
        self.requested = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked = self.headers.get("Range")
                server.requested.append(asked)
                if server.status:
                    self.send_error(server.status)
                    return
                start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and server.ranges else 0
                body = server.content[start:]
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: server.break_after])

            def log_message(self, *arguments):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def archive(self):
        url = f"http://127.0.0.1:{self.http.server_port}/ModelNet10.zip"
        return Archive(url, "ModelNet10", len(self.content), hashlib.sha256(self.content).hexdigest())

    def stop(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server():
    running = Server(zipped(GOOD | JUNK))
    yield running
    running.stop()


def test_the_data_arrive_without_resource_forks(tmp_path, server):
    folder = download_modelnet10(tmp_path / "new" / "root", server.archive)
    assert folder == tmp_path / "new" / "root" / "ModelNet10"
    expected = {name.removeprefix("ModelNet10/"): content for name, content in GOOD.items()}
    assert unpacked(folder) == expected
    assert server.requested == [None]
    assert download_modelnet10(tmp_path / "new" / "root", server.archive) == folder
    assert server.requested == [None]


def test_a_broken_connection_is_continued(tmp_path, server, monkeypatch):
    monkeypatch.setattr(download, "CHUNK_BYTES", 50)  # what came of a chunk is lost
    server.break_after = 100
    with pytest.raises(DownloadError, match=r"ended after 100 of .*Run the same command again.*by hand"):
        download_modelnet10(tmp_path, server.archive)
    assert (tmp_path / "ModelNet10.zip.part").read_bytes() == server.content[:100]
    server.break_after = None
    download_modelnet10(tmp_path, server.archive)
    assert server.requested == [None, "bytes=100-"]
    assert (tmp_path / "ModelNet10.zip").read_bytes() == server.content
    assert not (tmp_path / "ModelNet10.zip.part").exists()


def test_a_server_without_ranges_starts_again(tmp_path, server):
    server.ranges = False
    (tmp_path / "ModelNet10.zip.part").write_bytes(b"x" * 50)
    folder = download_modelnet10(tmp_path, server.archive)
    assert server.requested == ["bytes=50-"]
    assert unpacked(folder)["chair/train/chair_0001.off"] == TRIANGLE


@pytest.mark.parametrize("excess", [0, 7])
def test_a_part_that_needs_no_more_bytes(tmp_path, server, excess):
    (tmp_path / "ModelNet10.zip.part").write_bytes(server.content + b"x" * excess)
    download_modelnet10(tmp_path, server.archive)
    assert server.requested == ([None] if excess else [])
    assert (tmp_path / "ModelNet10.zip").read_bytes() == server.content


def test_another_size_is_refused_before_fetching(tmp_path, server):
    expected = Archive(server.archive.url, "ModelNet10", 10_000_000, "")
    with pytest.raises(DownloadError, match=r"offers [\d,]+ bytes; expected 10,000,000"):
        download_modelnet10(tmp_path, expected)
    assert not list(tmp_path.glob("ModelNet10*"))


def test_another_checksum_is_a_warning(tmp_path, server, caplog):
    expected = Archive(server.archive.url, "ModelNet10", len(server.content), "0" * 64)
    with caplog.at_level(logging.WARNING):
        assert download_modelnet10(tmp_path, expected).is_dir()
    assert "0" * 64 in caplog.text
    assert server.archive.sha256 in caplog.text


def test_a_refusing_server_and_no_server_say_how_to_go_on(tmp_path, server):
    server.status = 404
    with pytest.raises(DownloadError, match=r"answers 404 .*ModelNet10\.zip.*<class>/train"):
        download_modelnet10(tmp_path, server.archive)
    gone = Server(b"zip")
    gone.stop()
    with pytest.raises(DataError, match=r"failed: .*refused.*by hand"):
        download_modelnet10(tmp_path, gone.archive)


def test_a_zip_placed_by_hand_is_used_and_never_deleted(tmp_path, server):
    placed = tmp_path / "ModelNet10.zip"
    placed.write_bytes(server.content[:-1])
    with pytest.raises(DownloadError, match=r"expected .*delete it"):
        download_modelnet10(tmp_path, server.archive)
    assert placed.read_bytes() == server.content[:-1]
    placed.write_bytes(server.content)
    assert download_modelnet10(tmp_path, server.archive).is_dir()
    assert server.requested == []


def test_what_a_killed_attempt_left_is_removed(tmp_path, server):
    leftover = tmp_path / ".ModelNet10.unpacking" / "ModelNet10" / "chair" / "train" / "half.off"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"")
    folder = download_modelnet10(tmp_path, server.archive)
    assert "chair/train/half.off" not in unpacked(folder)
    assert not (tmp_path / ".ModelNet10.unpacking").exists()


def unpack_bytes(root, content):
    zip_file = root / "ModelNet10.zip"
    zip_file.write_bytes(content)
    unpack(zip_file, root / "data", "ModelNet10")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "../evil.off",
        "ModelNet10/../../evil.off",
        "/tmp/evil.off",
        "ModelNet10\\..\\..\\evil.off",
        "C:\\evil.off",
    ],
)
def test_paths_out_of_the_folder_are_refused(root, name):
    with pytest.raises(DownloadError, match="leads out of its folder"):
        unpack_bytes(root, zipped(GOOD | {name: b"evil"}))
    assert unpacked(root).keys() == {"ModelNet10.zip"}


def test_links_are_refused(root):
    link = zipfile.ZipInfo("ModelNet10/chair/train/link.off")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(DownloadError, match="is a link"):
        unpack_bytes(root, zipped(GOOD | {link: b"/etc/passwd"}))
    assert unpacked(root).keys() == {"ModelNet10.zip"}


def test_too_large_archives_are_refused(root, monkeypatch):
    monkeypatch.setattr(download, "LARGEST_UNPACKED_BYTES", 1_000_000)
    with pytest.raises(DownloadError, match="would unpack to"):
        unpack_bytes(root, zipped(GOOD | {"ModelNet10/chair/train/bomb.off": bytes(2_000_000)}))
    assert unpacked(root).keys() == {"ModelNet10.zip"}


def test_another_archive_is_refused(root):
    with pytest.raises(DownloadError, match="it is not ModelNet10"):
        unpack_bytes(root, zipped({"ModelNet10/README.txt": b"nothing else"}))
    with pytest.raises(DownloadError, match="damaged"):
        unpack_bytes(root, b"<html>no zip at all</html>")
    with pytest.raises(DownloadError, match="damaged"):
        unpack_bytes(root, zipped(GOOD | {"ModelNet10/chair": b"a file where a folder should be"}))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, len(zipped(GOOD)) - 1), byte=st.integers(1, 255), cut=st.booleans())
@example(place=493, byte=2, cut=False)  # a file that begins before the archive
@example(place=255, byte=4, cut=False)  # bzip2
def test_a_damaged_archive_is_an_error_or_does_no_harm(tmp_path_factory, place, byte, cut):
    content = bytearray(zipped(GOOD))
    content[place] ^= byte
    if cut:
        del content[place:]
    root = tmp_path_factory.mktemp("damaged")
    (root / "data").mkdir()
    try:
        unpack_bytes(root, bytes(content))
    except DownloadError:
        assert unpacked(root).keys() == {"ModelNet10.zip"}
    else:
        assert set(unpacked(root / "data" / "ModelNet10").values()) <= set(GOOD.values())
