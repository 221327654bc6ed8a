"""The web server of ``leaven serve``: pages of folders, a planner and a page of published runs.

It answers only GET requests. They must be addressed to this machine and contain the printed token. It
shows only folders that :func:`leaven.server.folders.find` finds, whatever path a request contains.
"""

import secrets
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from leaven.catalogue.runs import load_runs
from leaven.catalogue.starter.draft import StarterRequest
from leaven.catalogue.starter.starter import starter
from leaven.errors import InputError
from leaven.planning.cost import parse_price
from leaven.planning.hardware import parse_cluster
from leaven.planning.plan import ClusterPlan, plan_recipe
from leaven.planning.published import plan_run
from leaven.planning.start import laid_out
from leaven.recipe.units import parse_quantity
from leaven.server.folders import Found, find, row, tag
from leaven.views.catalogue_page import catalogue_page
from leaven.views.page import folder_page
from leaven.views.plan_page import FormField, plan_page
from leaven.views.render import ServedPage, plotly_gzipped, render, served

LINKS = {"folders": "/", "planner": "/plan", "published runs": "/published"}
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
FIELDS = (
    FormField("size", "size, or a published run", "7B or llama2-7b", "7B"),
    FormField("tokens", "tokens", "2T", "2T"),
    FormField("gpus", "cluster", "64xH100-80GB", "64xH100-80GB"),
    FormField("layout", "layout (empty: the best)", "tp=2,pp=4,mbs=1", ""),
    FormField("price", "price of a GPU-hour", "$2.50", ""),
)
LOCAL = ("127.0.0.1", "localhost")


def application(roots: list[Path], token: str) -> Starlette:
    """Return the web application for the folders in ``roots``. It refuses requests without the token ``token``."""
    routes = {
        "/": lambda request: _folders(request, roots),
        "/folder/{root}/{name:path}": lambda request: _folder(request, roots),
        "/plan": _planner,
        "/published": _published,
        "/plotly.js": _plotly,
    }
    return Starlette(
        # Plain functions run in threads, so that a slow page does not delay other requests.
        routes=[Route(path, answer, methods=["GET"]) for path, answer in routes.items()],
        middleware=[Middleware(TokenRequired, token=token)],
    )


class TokenRequired(BaseHTTPMiddleware):
    """Refuses requests without the right token. The address that ``leaven serve`` prints contains the token.
    Opening this address sets a cookie for later requests. To prevent DNS rebinding, requests to a host outside
    `LOCAL` are refused, too."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        super().__init__(app)
        self._token = token

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        cookie = f"leaven-{request.url.port}"
        if request.url.hostname not in LOCAL:
            return PlainTextResponse("open this page at http://127.0.0.1\n", 403, HEADERS)
        if self._is_token(request.query_params.get("token", "")):
            answer = RedirectResponse(request.url.path, 303, HEADERS)
            answer.set_cookie(cookie, self._token, httponly=True, samesite="strict")
            return answer
        if self._is_token(request.cookies.get(cookie, "")):
            return await call_next(request)
        return PlainTextResponse("no valid token; open the address that leaven serve printed\n", 403, HEADERS)

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self._token.encode())


def _page(request: Request, here: str, make: Callable[[], str], found: list[Found] | None = None) -> Response:
    """Return the HTML page from ``make``, or an error page for its InputError or OSError. If the folders
    ``found`` have not changed since the browser's last request, return an empty response with status 304."""
    mark = tag(found) if found is not None else ""
    if mark and request.headers.get("If-None-Match") == mark:
        return Response(status_code=304, headers=HEADERS | {"ETag": mark})
    with served(ServedPage(LINKS, here, mark)):
        try:
            html = make()
        except (InputError, OSError) as error:
            html = render("fault.html.j2", {}, kind=here or "folder", title=request.url.path, fault=str(error))
    content = html.encode(errors="backslashreplace")  # names of folders may have bytes that are not UTF-8
    return HTMLResponse(content, headers=HEADERS | ({"ETag": mark} if mark else {}))


def _folders(request: Request, roots: list[Path]) -> Response:
    errors: list[OSError] = []
    found = list(find(roots, errors.append))

    def make() -> str:
        now = time.time()
        rows = sorted((row(each, now) for each in found), key=lambda each: -each.found.changed)
        where = ", ".join(map(str, roots))
        nothing = f"There is no run, study, check or demo in {where} yet."
        return render(
            "folders.html.j2",
            {},
            kind="folders",
            title=roots[0].name if len(roots) == 1 else "Folders",
            rows=rows,
            verdict=(f"In {where}: {_counted(found)}." if rows else nothing) + _unlisted(errors),
        )

    return _page(request, "folders", make, found)


def _counted(found: list[Found]) -> str:
    plural = {"run": "runs", "study": "studies", "check": "checks", "demo": "demos"}
    kinds = Counter(each.kind for each in found)
    return ", ".join(f"{n} {kind if n == 1 else plural[kind]}" for kind in plural if (n := kinds[kind]))


def _unlisted(errors: list[OSError]) -> str:
    """Return a sentence about folders that cannot be listed, or "" if there are none. Skip removed folders."""
    lost = [error for error in errors if not isinstance(error, FileNotFoundError)]
    if not lost:
        return ""
    others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return f" Folders that cannot be listed: {lost[0].filename} ({lost[0].strerror}){others}."


def _folder(request: Request, roots: list[Path]) -> Response:
    address = request.path_params["root"], request.path_params["name"]
    found = next((each for each in find(roots) if (str(each.root), each.name) == address), None)
    if found is None:
        return PlainTextResponse("there is no run, study, check or demo at this address; open /\n", 404, HEADERS)
    return _page(request, "", lambda: folder_page(found.folder), [found])


def _published(request: Request) -> Response:
    return _page(request, "published runs", lambda: catalogue_page(load_runs()))


def _plotly(request: Request) -> Response:
    headers = HEADERS | {"Content-Encoding": "gzip", "Cache-Control": "max-age=86400"}
    return Response(plotly_gzipped(), media_type="text/javascript", headers=headers)


def _planner(request: Request) -> Response:
    form = [replace(field, value=request.query_params.get(field.name, field.value).strip()) for field in FIELDS]
    given = {field.name: field.value for field in form}

    def make() -> str:
        try:
            plan, name = _planned(given)
            document = plan.document(price=parse_price(given["price"]) if given["price"] else None)
            return plan_page(plan, document, name, _command(given), form)
        except InputError as error:
            title = given["size"] or "Planner"
            return render("planner.html.j2", {}, kind="plan", title=title, fault=str(error), form=form, document=None)

    return _page(request, "planner", make)


def _planned(given: Mapping[str, str]) -> tuple[ClusterPlan, str]:
    """Return (plan, title) for the input of the form. Its field ``size`` is a number or the id of a published run."""
    size, gpus, layout = given["size"], given["gpus"], given["layout"] or None
    if size and not size[0].isdigit():
        return plan_run(size, gpus, layout), size
    request = StarterRequest(size, parse_quantity(size), parse_quantity(given["tokens"]), proxy=0)
    cluster = parse_cluster(gpus)
    recipe = laid_out(starter(replace(request, gpus=cluster.gpus)), cluster).target
    return plan_recipe(recipe, gpus, layout), f"{size} on {given['tokens']} tokens"


def _command(given: Mapping[str, str]) -> str:
    options = ["--gpus", given["gpus"]]
    options += [part for key in ("layout", "price") if given[key] for part in (f"--{key}", given[key])]
    if given["size"] and not given["size"][0].isdigit():
        return shlex.join(["leaven", "plan", given["size"], *options])
    new = ["leaven", "new", "mine.toml", "--params", given["size"], "--tokens", given["tokens"]]
    new += ["--gpus", given["gpus"]]  # the batch and the layout depend on it
    return f"{shlex.join(new)} && {shlex.join(['leaven', 'plan', 'mine.toml', *options])}"
