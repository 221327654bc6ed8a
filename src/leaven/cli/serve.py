"""Defines the command ``leaven serve``."""

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from leaven.cli.common import JsonOption, argument, option, print_document
from leaven.documents.runs import ServeDocument
from leaven.errors import InputError

PORT = 8421


def serve(
    folders: Annotated[
        list[Path] | None,
        argument(
            "FOLDER...",
            "Show the runs, studies, checks and demos in these folders and their subfolders.",
            default="the current folder",
        ),
    ] = None,
    port: Annotated[int, option("The port of the server on 127.0.0.1.", min=1, max=65_535)] = PORT,
    json_output: JsonOption = False,
) -> None:
    import uvicorn

    from leaven.server.app import application
    from leaven.server.folders import find

    roots = [folder.resolve() for folder in folders or [Path()]]
    for folder, root in zip(folders or [], roots, strict=False):
        if not root.is_dir():
            raise InputError(f"there is no folder {folder}; give a folder of runs or studies")
        if next(find([root]), None) is None:
            raise InputError(
                f"{folder} contains no run, study, check or demo; give the folder that leaven train --run, "
                "leaven tune --study, leaven check --run or leaven demo writes"
            )
    token = secrets.token_urlsafe(18)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise InputError(
                f"--port {port} cannot be used ({os.strerror(error.errno or 0).lower()}); give another port"
            ) from None
        url = f"http://127.0.0.1:{port}/?token={token}"
        document = ServeDocument(url=url, folders=[str(root) for root in roots])
        print_document(document, [f"open       {url}", "stop       Ctrl-C"], json_output)
        server = uvicorn.Server(uvicorn.Config(application(roots, token), log_level="warning", server_header=False))
        with suppress(KeyboardInterrupt):  # Ctrl-C stops the server
            server.run([listener])
