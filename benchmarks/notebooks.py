"""Run the notebooks of examples/notebooks in empty folders; stop with an error at the first cell that fails.

python -m benchmarks.notebooks           # as CI does
python -m benchmarks.notebooks --keep    # also write the output into the notebooks
"""

import argparse
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "examples/notebooks"
SECONDS = 1_800  # limit for one cell


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
                cell.metadata = {}  # run times differ between machines
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
