"""The notebook, executed."""

import nbformat
import pytest
from nbclient import NotebookClient

WITHOUT_A_SCRIPT = """
try:
    pl.Trainer(accelerator="cpu", devices=2, strategy="hierarchical_daso")
except Exception as error:
    print(error)
"""


@pytest.mark.nightly  # a push tests the refused start in _lightning/test_launcher.py
@pytest.mark.long("a Jupyter kernel imports everything, and four ranks take the notebook's 640 steps")
def test_two_nodes_train_in_a_notebook_and_a_wrong_start_is_refused(folder):
    notebook = nbformat.read(folder.examples / "notebook.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(WITHOUT_A_SCRIPT))
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder.path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert "Communication of 640 optimizer steps on 4 ranks" in printed
    assert "Trainer(strategy='hierarchical_periodic_notebook')" in printed
    (loss,) = (output.data["text/plain"] for output in outputs if output.output_type == "execute_result")
    assert float(loss.removeprefix("tensor(").removesuffix(")")) < 0.05  # of a sine, whose variance is 0.5
    assert any("image/png" in output.get("data", {}) for output in outputs)
