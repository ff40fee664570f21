"""The page at / for a person with a browser: three files beside this one, no build step, nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["page_routes"]

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}


def page_routes() -> list[Route]:
    """Routes of the page's files, read once."""
    return [_route(path, *row) for path, row in _FILES.items()]


def _route(path: str, name: str, media_type: str) -> Route:
    content = files("halocline.serving").joinpath(name).read_bytes()
    headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "cache-control": "no-cache"}

    async def endpoint(_request: Request) -> Response:
        return Response(content, media_type=media_type, headers=headers)

    return Route(path, endpoint)
