"""Web application of the viewer: one page, and the runs' files as JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from jaxrlhf.processes.http_server import HttpServer
from jaxrlhf.tracking.records import jsonable
from jaxrlhf.viewer.explanations import explanations
from jaxrlhf.viewer.run_files import RunFiles

PAGE = Path(__file__).with_name("page")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""Response headers that let the page run only its own scripts, whatever text a model generates."""


class ViewServer(HttpServer):
    """HTTP server of the viewer, at 127.0.0.1."""

    def __init__(self, files: RunFiles, *, port: int) -> None:
        super().__init__(host="127.0.0.1", port=port, flags="--port")
        self.answer_by(view_app(files))


def view_app(files: RunFiles) -> Starlette:
    """Build the application; it answers only requests to local host names, so that no other site can read it."""

    def metrics(request: Request) -> Any:
        records = files.metrics(request.query_params["run"])
        after = float(request.query_params.get("after", "-inf"))
        new = [record for record in records if record["step"] > after]
        return {"before": len(records) - len(new), "records": new}

    def steps(request: Request) -> Any:
        return files.steps(request.query_params["run"], request.query_params["kind"])

    def samples(request: Request) -> Any:
        query = request.query_params
        return files.samples(query["run"], query["kind"], int(query["step"]))

    endpoints: dict[str, Callable[[Request], Any]] = {
        "explanations": lambda _: [row._asdict() for row in explanations()],
        "runs": lambda _: {"root": str(files.root), "runs": files.runs()},
        "metrics": metrics,
        "steps": steps,
        "samples": samples,
        "settings": lambda request: files.settings(request.query_params["run"]),
        "timeline": lambda request: files.timeline(request.query_params["run"]),
    }
    routes = [Route(f"/api/{name}", _json(answer)) for name, answer in endpoints.items()]
    routes += [Route("/" if file == "index.html" else f"/{file}", _file(PAGE / file)) for file in _page_files()]
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])],
    )


def _page_files() -> list[str]:
    return sorted(file.name for file in PAGE.iterdir() if file.suffix in (".html", ".js", ".css"))


def _file(path: Path) -> Callable[[Request], Response]:
    return lambda _: FileResponse(path, headers=HEADERS)


class _AnyJson(JSONResponse):
    """JSON of any content: numbers that are not finite are null, and lone surrogates are escaped."""

    def render(self, content: Any) -> bytes:
        try:
            return json.dumps(content, allow_nan=False).encode()
        except ValueError:  # rare, because `jsonable` is much slower
            return json.dumps(jsonable(content)).encode()


def _json(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    def respond(request: Request) -> Response:
        try:
            return _AnyJson(answer(request), headers=HEADERS)
        except FileNotFoundError as error:
            return _AnyJson({"error": f"not found: {error}"}, 404, HEADERS)
        except (KeyError, ValueError, TypeError, AttributeError, OSError, RecursionError) as error:
            return _AnyJson({"error": f"invalid request: {error!r:.500}"}, 400, HEADERS)

    return respond
