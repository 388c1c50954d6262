"""A model hub on this machine, of as much of its interface as downloads use."""

import hashlib
import json
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


@dataclass
class Contents:
    """What a hub has, how it misbehaves, and what it was asked for.

    Attributes:
      repositories: Files by repository and branch, tag or commit; that of a data set begins with `datasets/`.
      gated: Repositories whose files need a login, and the status without one.
      torn: Files of which half is sent.
      asked: Method and path of every request so far.
    """

    repositories: dict[str, dict[str, Files]]
    gated: dict[str, int] = field(default_factory=dict)
    torn: set[str] = field(default_factory=set)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def sent(self) -> set[str]:
        """Names of the files that were downloaded."""
        return {path.rpartition("/")[2] for method, path in self.asked if method == "GET" and "/resolve/" in path}


def serve(contents: Contents) -> ThreadingHTTPServer:
    """The hub at some port, for a thread to run."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            path = urlsplit(self.path).path.strip("/")
            contents.asked.append((self.command, path))
            api = path.startswith("api/")
            path = path.removeprefix("api/").removeprefix("models/")
            kind = "datasets/" if path.startswith("datasets/") else ""
            owner, name, *rest = map(unquote, f"{path.removeprefix(kind)}/".split("/"))
            rest = [part for part in rest if part]
            branches = contents.repositories.get(f"{kind}{owner}/{name}")
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
            if repository in contents.gated and "Authorization" not in self.headers:
                return self._send(contents.gated[repository], error="GatedRepo")
            if name not in files:
                return self._send(404, error="EntryNotFound")
            content = files[name]
            if self.command == "GET" and name in contents.torn:
                content = content[: len(content) // 2]
            about = {"ETag": f'"{etag(files[name])}"', "X-Repo-Commit": commit_of(files)}
            return self._send(200, content, **about)

        def _json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

        def _send(self, status: int, content: bytes = b"", error: str | None = None, **headers: str) -> None:
            self.send_response(status)
            if error is not None:
                headers["X-Error-Code"] = error
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def commit_of(files: Files) -> str:
    """Of a state of a repository, forty hexadecimal digits."""
    return hashlib.sha1(b"".join(name.encode() + content for name, content in sorted(files.items()))).hexdigest()


def etag(content: bytes) -> str:
    """Of a file."""
    return hashlib.sha1(content).hexdigest()
