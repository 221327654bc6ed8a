"""Runs the notebooks of examples/notebooks in empty folders; a cell that fails ends it with its error.

python -m benchmarks.notebooks           # as CI does
python -m benchmarks.notebooks --keep    # and writes the output into the notebooks
"""

import argparse
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "examples/notebooks"
SECONDS = 1_800  # for one cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true")
    keep = parser.parse_args().keep
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook, began = nbformat.read(path, 4), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": folder}}).execute()
        if keep:
            for cell in notebook.cells:
                cell.metadata = {}  # times of cells are those of one machine
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
