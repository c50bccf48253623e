"""A server on this machine that speaks as much of the Hub's HTTP API as publishing and loading a model takes.

As a program it runs commands against such a Hub, as the client reads HF_ENDPOINT when it is imported: one JSON list per
line, the token and either a command line or ``["-c", PROGRAM]``; answers are exit code, stdout and stderr.
"""

import base64
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any, ClassVar, NamedTuple
from urllib.parse import unquote, urlsplit

USERS = {
    "hf_writer": {"name": "alice", "orgs": [{"name": "lab"}], "auth": {"accessToken": {"role": "write"}}},
    "hf_reader": {"name": "alice", "orgs": [], "auth": {"accessToken": {"role": "read"}}},
    "hf_other": {"name": "bob", "orgs": [{"name": "lab"}], "auth": {"accessToken": {"role": "fineGrained"}}},
}


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    read_only: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        sha = hashlib.sha1(f"{len(self.messages)} {message}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        self.messages.append(message)
        return sha

    def sha(self, revision: str) -> str:
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.sha(revision)]


class Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "", **fields: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.fields = status, code, message, fields


@dataclass
class Call:
    body: bytes
    user: dict[str, Any] | None
    repo: str = ""
    revision: str = ""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def names(self) -> list[str]:
        return [] if self.user is None else [self.user["name"], *(org["name"] for org in self.user["orgs"])]


NAME = r"(?P<repo>[\w.-]+/[\w.-]+)"


class Hub:
    """Repositories, what was uploaded, and per upload to come a fault: ``cut`` half-way, ``refuse`` (410) or ``ok``."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[str] = []
        self.requests: list[str] = []
        self.lock = Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def add(self, name: str, folder: Path, **settings: Any) -> Repo:
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repos[name] = Repo(**settings)
        self.repos[name].commit("main", files, "first")
        return self.repos[name]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def visible(self, call: Call) -> Repo:
        repo = self.repos.get(call.repo)
        owner = call.repo.split("/")[0]
        if repo is None or (repo.private and owner not in call.names):
            raise Refused(404 if call.user else 401, "RepoNotFound", "Repository not found")
        if repo.gated and owner not in call.names:
            raise Refused(403, "GatedRepo", "Access is restricted")
        return repo

    def writable(self, call: Call) -> Repo:
        repo = self.visible(call)
        role = call.user["auth"]["accessToken"]["role"] if call.user else "read"
        if call.repo.split("/")[0] not in call.names or role == "read" or repo.read_only:
            raise Refused(403, "", "You don't have the rights to write here")
        return repo

    def whoami(self, call: Call) -> Any:
        if call.user is None:
            raise Refused(401, "", "Invalid credentials in Authorization header")
        return {"type": "user", **call.user}

    def create(self, call: Call) -> Any:
        owner = call.json["organization"] or call.names[0]
        name = f"{owner}/{call.json['name']}"
        if name in self.repos:
            raise Refused(409, "", "You already created this model repo", url=f"{self.address}/{name}")
        if owner not in call.names:
            raise Refused(403, "", "You don't have the rights to create a model under this namespace")
        self.repos[name] = Repo(private=call.json.get("visibility") == "private")
        self.repos[name].commit("main", {}, "initial commit")
        return {"url": f"{self.address}/{name}", "name": name}

    def info(self, call: Call) -> Any:
        repo = self.visible(call)
        return {"id": call.repo, "private": repo.private, "sha": repo.sha(call.revision or "main"), "siblings": []}

    def auth_check(self, call: Call) -> Any:
        self.writable(call)
        return {}

    def branch(self, call: Call) -> Any:
        repo = self.writable(call)
        if call.revision in repo.branches:
            raise Refused(409, "", "Reference already exists")
        repo.branches[call.revision] = repo.branches["main"]
        return {}

    def tree(self, call: Call) -> Any:
        files = self.visible(call).files(call.revision)
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]

    def preupload(self, call: Call) -> Any:
        self.writable(call).sha(call.revision)
        files = []
        for name in (entry["path"] for entry in call.json["files"]):
            mode = "lfs" if name.endswith(".safetensors") else "regular"
            files.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": None})
        return {"files": files}

    def batch(self, call: Call) -> Any:
        self.writable(call)
        objects = []
        for wanted in call.json["objects"]:
            places = {"upload": f"{self.address}/lfs/{wanted['oid']}", "verify": f"{self.address}/lfs/verify"}
            actions = {name: {"href": place} for name, place in places.items()}
            objects.append(wanted if wanted["oid"] in self.objects else {**wanted, "actions": actions})
        return {"transfer": "basic", "objects": objects}

    def verify(self, call: Call) -> Any:
        if len(self.objects.get(call.json["oid"], b"")) != call.json["size"]:
            raise Refused(400, "", "object is not whole")
        return {}

    def commit(self, call: Call) -> Any:
        repo = self.writable(call)
        files, message = dict(repo.files(call.revision)), ""
        for line in map(json.loads, call.body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        sha = repo.commit(call.revision, files, message)
        return {"success": True, "commitUrl": f"{self.address}/{call.repo}/commit/{sha}", "commitOid": sha}

    def validate(self, call: Call) -> Any:
        return {"errors": [], "warnings": []}


ROUTES = [
    ("GET", "/api/whoami-v2", "whoami"), ("POST", "/api/validate-yaml", "validate"),
    ("POST", "/api/repos/create", "create"), ("GET", f"/api/models/{NAME}", "info"),
    ("GET", f"/api/models/{NAME}/revision/(?P<revision>[^/]+)", "info"),
    ("GET", f"/api/models/{NAME}/auth-check/write", "auth_check"),
    ("GET", f"/api/models/{NAME}/tree/(?P<revision>[^/]+)", "tree"),
    ("POST", f"/api/models/{NAME}/branch/(?P<revision>[^/]+)", "branch"),
    ("POST", f"/api/models/{NAME}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", f"/api/models/{NAME}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", "batch"), ("POST", "/lfs/verify", "verify"),
]  # fmt: skip
"""Method and path of a request, and the method of ``Hub`` that answers it."""


class Handler(BaseHTTPRequestHandler):
    hub: ClassVar[Hub]
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def handle_any(self) -> None:
        hub = self.hub
        path = urlsplit(self.path).path
        with hub.lock:
            hub.requests.append(f"{self.command} {unquote(path)}")
        length = int(self.headers.get("Content-Length", 0))
        if path.startswith("/lfs/") and self.command == "PUT":
            return self.store(path.removeprefix("/lfs/"), length)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        call = Call(self.rfile.read(length), USERS.get(token))
        try:
            if token and call.user is None:
                raise Refused(401, "", "Invalid credentials in Authorization header")
            if "/resolve/" in path:
                return self.file(call, path)
            for method, pattern, answer in ROUTES:
                if method == self.command and (found := re.fullmatch(pattern, path)):
                    call.repo = found.groupdict().get("repo", "")
                    call.revision = unquote(found.groupdict().get("revision", ""))
                    return self.reply(json.dumps(getattr(hub, answer)(call)).encode())
            raise Refused(404, "", f"no route {self.command} {path}")
        except Refused as error:
            self.reply(json.dumps({"error": error.message, **error.fields}).encode(), error.status, error)

    do_GET = do_POST = do_PUT = do_HEAD = handle_any

    def store(self, oid: str, length: int) -> None:
        hub = self.hub
        with hub.lock:
            fault = hub.faults.pop(0) if hub.faults else "ok"
        if fault == "cut":
            self.rfile.read(length // 2)
            self.close_connection = True
            return self.connection.close()
        data = self.rfile.read(length)
        if fault == "refuse":
            return self.reply(b"{}", 410)
        assert hashlib.sha256(data).hexdigest() == oid
        hub.objects[oid] = data
        return self.reply(b"")

    def file(self, call: Call, path: str) -> None:
        call.repo, rest = path.lstrip("/").split("/resolve/")
        revision, name = rest.split("/", 1)
        repo = self.hub.visible(call)
        sha = repo.sha(unquote(revision))
        if unquote(name) not in repo.commits[sha]:
            raise Refused(404, "EntryNotFound", "Entry not found")
        data = repo.commits[sha][unquote(name)]
        self.reply(data, headers={"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": sha})

    def reply(
        self, body: bytes, status: int = 200, error: Refused | None = None, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if error is not None:
            self.send_header("X-Error-Code", error.code)
            self.send_header("X-Error-Message", error.message)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


REPOSITORY = Path(__file__).resolve().parents[2]


class Result(NamedTuple):
    code: int
    out: str
    err: str


class Session:
    """One such process; commands run one after the other in it. ``home``: the cache of the client."""

    def __init__(self, address: str, home: Path, offline: bool = False) -> None:
        settings = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(offline))}
        settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
        given = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
        environment = {**given, **settings, "PYTHONPATH": str(REPOSITORY)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, __file__], text=True, env=environment, **pipes)

    def run(self, *argv: object, token: str | None = "hf_writer") -> Result:
        print(json.dumps([token, *map(str, argv)]), file=self.process.stdin, flush=True)
        return Result(*json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def _serve() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    for line in sys.stdin:
        token, *argv = json.loads(line)
        os.environ.pop("HF_TOKEN", None)
        if token is not None:
            os.environ["HF_TOKEN"] = token
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = _run(argv)
        print(json.dumps([code, out.getvalue(), err.getvalue()]), file=answers, flush=True)


def _run(argv: list[str]) -> int:
    from subtoken_train.cli.main import dispatch
    from subtoken_train.cli.terminal import guarded

    def program() -> int:
        exec(argv[1], {})
        return 0

    return guarded(program if argv[0] == "-c" else lambda: dispatch(argv))


if __name__ == "__main__":
    _serve()
