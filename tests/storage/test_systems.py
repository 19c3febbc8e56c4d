"""Retries, credentials and the words of errors, on servers that fail."""

import builtins
import http.server
import importlib
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import fsspec
import gcsfs.core
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from xlatrainer import storage
from xlatrainer.storage import systems


class Flaky(MemoryFileSystem):
    """Files in memory whose reads fail as often as `errors` has some."""

    protocol = "flaky"
    store: dict[str, Any] = {}
    errors: list[Exception] = []

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        if self.errors:
            raise self.errors.pop()
        return bytes(super().cat_file(path, start, end))


class Status(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"answered {status}")
        self.status = status


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> str:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(systems, "FIRST_PAUSE", 0.001)
    Flaky.errors = []
    storage.write("flaky://file", "text")
    return "flaky://file"


@pytest.mark.parametrize("error", [ConnectionResetError(), TimeoutError(), Status(503), Status(429)], ids=repr)
def test_what_is_transient_is_tried_again(flaky: str, error: Exception) -> None:
    Flaky.errors = [error] * (systems.ATTEMPTS - 1)
    assert storage.read(flaky) == b"text"
    Flaky.errors = [error] * systems.ATTEMPTS
    with pytest.raises(type(error)):
        storage.read(flaky)
    assert not Flaky.errors


@pytest.mark.parametrize("error", [Status(400), OSError("full"), ValueError()], ids=repr)
def test_what_is_not_is_raised_at_once(flaky: str, error: Exception) -> None:
    Flaky.errors = [ConnectionResetError(), error]
    with pytest.raises(type(error)):
        storage.read(flaky)
    assert len(Flaky.errors) == 1


def test_refusals(flaky: str) -> None:
    for refused in (Status(403), Status(401), PermissionError("no")):
        Flaky.errors = [refused]
        with pytest.raises(PermissionError, match="access to flaky://file is refused"):
            storage.read(flaky)
    Flaky.errors = [Status(404)]
    with pytest.raises(FileNotFoundError, match="flaky://file does not exist"):
        storage.read(flaky)


def test_a_missing_bucket_is_said(bucket: str) -> None:
    for attempt in (lambda: storage.read("gs://none/file"), lambda: storage.write("gs://none/file", "text")):
        with pytest.raises(FileNotFoundError, match=r"gs://none/file .* no bucket 'none'"):
            attempt()
    with pytest.raises(FileNotFoundError, match="does not exist$"):
        storage.read(f"{bucket}/none")
    with pytest.raises(ValueError, match="gs://BUCKET_NAME/PATH"):
        storage.read("gs://")


@pytest.mark.parametrize("url", ["gs://bucket", "gs://bucket/", "gs://bucket/folder/", "memory://folder/"])
def test_what_can_be_no_file_is_refused(url: str, bucket: str) -> None:
    attempts: list[Any] = [
        storage.read,
        storage.remove,
        lambda url: storage.write(url, "text"),
        lambda url: storage.open_file(url, "w"),
        lambda url: storage.publish_file(url, lambda path: None),
    ]
    for attempt in attempts:
        with pytest.raises(ValueError, match="is no file, but a bucket or folder"):
            attempt(url)


class _Server(http.server.BaseHTTPRequestHandler):
    answers: list[int] = []
    authorizations: list[str | None] = []

    def do_POST(self) -> None:
        """Give a token to whoever asks with signed credentials."""
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        status, body = (
            (200, b'{"access_token": "a-token", "expires_in": 3600}') if b"assertion=" in asked else (400, b"{}")
        )
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.authorizations.append(self.headers["Authorization"])
        status = self.answers.pop(0) if self.answers else 200
        body = b'{"error": {"message": "said the server"}}' if status >= 400 else b"text"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        pass


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The statuses with which a server answers requests for gs://, before it gives "text"."""
    server = http.server.ThreadingHTTPServer(("localhost", 0), _Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://localhost:{server.server_port}")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    gcsfs.core.GCSFileSystem.clear_instance_cache()
    _Server.answers, _Server.authorizations = [], []
    yield _Server.answers
    server.shutdown()
    thread.join()
    server.server_close()
    gcsfs.core.GCSFileSystem.clear_instance_cache()


def test_google_is_asked_again_after_a_transient_error(answering: list[int]) -> None:
    answering += [503]
    assert storage.read("gs://bucket/file") == b"text"
    assert not answering


def test_google_refuses(answering: list[int]) -> None:
    answering += [403]
    with pytest.raises(PermissionError, match="gs://bucket/file is refused(.|\n)*GOOGLE_APPLICATION_CREDENTIALS"):
        storage.read("gs://bucket/file")


def test_credentials_are_used(answering: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Those of a service account get a token from the server that the file names; the token goes with the request."""
    assert storage.read("gs://bucket/file") == b"text"
    assert _Server.authorizations == [None]
    rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {
        "type": "service_account",
        "client_email": "tests@example.org",
        "private_key": key.decode(),
        "project_id": "tests",
        "token_uri": f"{os.environ['STORAGE_EMULATOR_HOST']}/token",
    }
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    assert storage.read("gs://bucket/file") == b"text"
    assert _Server.authorizations[1:] == ["Bearer a-token"]
    answering += [403]
    with pytest.raises(PermissionError, match="Credentials are those of .*account.json"):
        storage.read("gs://bucket/file")


def test_without_gcsfs_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str, *rest: Any) -> Any:
        if name == "gcsfs.core":
            raise ImportError("No module named 'gcsfs'")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ImportError, match=r'gs:// needs the package .gcsfs.core.*pip install "xlatrainer\[gcs\]"'):
        storage.read("gs://bucket/file")


def test_local_files_need_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(fsspec, "url_to_fs", None)
    storage.write(tmp_path / "file", "text")
    with builtins.open(tmp_path / "file") as file:
        assert file.read() == "text"
