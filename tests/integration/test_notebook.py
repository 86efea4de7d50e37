"""The notebook runs from its first cell to its last, in a kernel of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


async def test_the_notebook_streams_samples_and_plots(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    await NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).async_execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown: list[dict[str, Any]] = [output["data"] for output in outputs if "data" in output]
    assert any(output.output_type == "stream" and output.name == "stdout" and output.text.strip() for output in outputs)
    assert any("image/png" in data for data in shown)
    assert any("torch.Size" in data.get("text/plain", "") for data in shown)
    assert sum("text/html" in data for data in shown) >= 2  # a completion and a group


def test_the_notebook_is_kept_without_outputs() -> None:
    assert all(not cell.outputs for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code")
