"""What the local Hub knows: users, repositories, and how a request is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

USERS = {
    "hf_writer": {"name": "alice", "orgs": [{"name": "lab"}], "auth": {"accessToken": {"role": "write"}}},
    "hf_reader": {"name": "alice", "orgs": [], "auth": {"accessToken": {"role": "read"}}},
    "hf_other": {"name": "bob", "orgs": [{"name": "lab"}], "auth": {"accessToken": {"role": "fineGrained"}}},
}


@dataclass
class Repo:
    """Branches point at commits; a commit is its files and its message."""

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

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)]


class Refused(Exception):
    """An answer that is an error; ``fields`` go into its body."""

    def __init__(self, status: int, code: str = "", message: str = "", **fields: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.fields = status, code, message, fields


@dataclass
class Call:
    """One request: who asks, for what."""

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
