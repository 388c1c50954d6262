"""A model hub on this machine, of as much of its interface as downloads and uploads of small files use."""

import base64
import hashlib
import json
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


@dataclass
class Contents:
    """Contents of a hub, its faults, and the requests that it got.

    Attributes:
      repositories: Files by repository and branch, tag or commit; that of a data set begins with `datasets/`.
      gated: Repositories whose files need a login, and the status without one.
      torn: Files that are sent by half.
      asked: Method and path of every request so far.
      users: Names by token: who may make and write repositories under their name.
      private: Repositories that were made so.
    """

    repositories: dict[str, dict[str, Files]]
    gated: dict[str, int] = field(default_factory=dict)
    torn: set[str] = field(default_factory=set)
    asked: list[tuple[str, str]] = field(default_factory=list)
    users: dict[str, str] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)

    def sent(self) -> set[str]:
        """Names of the files that were downloaded."""
        return {path.rpartition("/")[2] for method, path in self.asked if method == "GET" and "/resolve/" in path}


class Handler(BaseHTTPRequestHandler):
    """Answers of a hub that has some contents."""

    contents: Contents

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        path = urlsplit(self.path).path.strip("/").removeprefix("api/")
        self.contents.asked.append((self.command, path))
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if path == "validate-yaml":
            return self._json({"errors": [], "warnings": []})
        user = self._user()
        if user is None:
            return self._send(401)
        if path == "repos/create":
            asked = json.loads(body)
            name = f"{asked['organization'] or user}/{asked['name']}"
            if asked.get("visibility") == "private":
                self.contents.private.add(name)
            known = name in self.contents.repositories
            self.contents.repositories.setdefault(name, {"main": {".gitattributes": b""}})
            return self._json(
                {"url": f"http://127.0.0.1:{self.server.server_port}/{name}"}, status=409 if known else 200
            )
        _, owner, name, what, *_ = path.split("/")
        if owner != user:
            return self._send(403)
        if what == "preupload":
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        return self._commit(f"{owner}/{name}", [json.loads(line) for line in body.splitlines()])

    def _commit(self, repository: str, operations: list[dict[str, Any]]) -> None:
        files = self.contents.repositories[repository]["main"]
        for one in operations:
            value = one["value"]
            if one["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif one["key"] == "deletedFile":
                del files[value["path"]]
        self._json({"commitUrl": f"/{repository}/commit/{commit_of(files)}", "commitOid": commit_of(files)})

    def _user(self) -> str | None:
        return self.contents.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = urlsplit(self.path).path.strip("/")
        self.contents.asked.append((self.command, path))
        if path == "api/whoami-v2":
            user = self._user()
            return self._send(401) if user is None else self._json({"name": user, "orgs": [{"name": "org"}]})
        api = path.startswith("api/")
        path = path.removeprefix("api/").removeprefix("models/")
        kind = "datasets/" if path.startswith("datasets/") else ""
        owner, name, *rest = map(unquote, f"{path.removeprefix(kind)}/".split("/"))
        rest = [part for part in rest if part]
        branches = self.contents.repositories.get(f"{kind}{owner}/{name}")
        if branches is None:
            return self._send(404, error="RepoNotFound")
        what, revision, *file = rest or ("revision", "main")
        commits = {commit_of(files): files for files in branches.values()}
        files = commits.get(revision, branches.get(revision))
        if files is None:
            return self._send(404, error="RevisionNotFound")
        if api and what == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self._json({"id": f"{owner}/{name}", "sha": commit_of(files), "siblings": siblings})
        if api:
            entries = [{"type": "file", "path": name, "size": len(content)} for name, content in files.items()]
            return self._json([entry | {"oid": etag(files[entry["path"]])} for entry in entries])
        return self._file(f"{owner}/{name}", "/".join(file), files)

    def _file(self, repository: str, name: str, files: Files) -> None:
        if repository in self.contents.gated and "Authorization" not in self.headers:
            return self._send(self.contents.gated[repository], error="GatedRepo")
        if name not in files:
            return self._send(404, error="EntryNotFound")
        content = files[name]
        if self.command == "GET" and name in self.contents.torn:
            content = content[: len(content) // 2]
        about = {"ETag": f'"{etag(files[name])}"', "X-Repo-Commit": commit_of(files)}
        return self._send(200, content, **about)

    def _json(self, value: object, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes = b"", error: str | None = None, **headers: str) -> None:
        self.send_response(status)
        if error is not None:
            headers["X-Error-Code"] = error
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def serve(contents: Contents) -> ThreadingHTTPServer:
    """The hub at some port, for a thread to run."""
    return ThreadingHTTPServer(("127.0.0.1", 0), type("ContentsHandler", (Handler,), {"contents": contents}))


def commit_of(files: Files) -> str:
    """Return the commit of a state of a repository, forty hexadecimal digits."""
    return hashlib.sha1(b"".join(name.encode() + content for name, content in sorted(files.items()))).hexdigest()


def etag(content: bytes) -> str:
    """Return the entity tag of a file."""
    return hashlib.sha1(content).hexdigest()
