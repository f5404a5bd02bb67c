"""The README and the documentation: what they show exists, and the site builds."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lightning_hiercomm
from lightning_hiercomm.schemes import SCHEMES

CHECKOUT = Path(__file__).resolve().parents[2]
README = CHECKOUT / "README.md"
EXAMPLES = sorted((CHECKOUT / "examples").rglob("README.md"))
PAGES = sorted((CHECKOUT / "docs").glob("[!_]*.md")) + sorted((CHECKOUT / "docs" / "schemes").glob("*.md"))


def test_the_readme_is_short_and_shows_the_quickstart_as_it_runs():
    text = README.read_text()
    assert len(text.splitlines()) <= 120
    quickstart = (CHECKOUT / "examples" / "quickstart.py").read_text()
    assert len(quickstart.splitlines()) <= 25
    assert f"```python\n{quickstart}```\n" in text


@pytest.mark.parametrize(
    "page", [README, CHECKOUT / "CONTRIBUTING.md", *PAGES, *EXAMPLES], ids=lambda page: str(page.relative_to(CHECKOUT))
)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_a_slurm_job_of_an_elastic_node_whose_time_is_up_is_queued_again_when_the_node_has_left(tmp_path):
    """SLURM itself queues jobs again that it preempts, and none whose program ended, or whose time is over."""
    (job,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (CHECKOUT / "docs/elastic.md").read_text(), re.DOTALL)
    (told,) = re.findall(r"--signal=B:(\w+)@", job)
    programs = {
        "torchrun": "trap 'echo left; exit 1' TERM; echo trains; for _ in {1..200}; do sleep 0.05; done",
        "scontrol": "echo $*",
    }
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", "-c", job], env=environment, stdout=subprocess.PIPE) as shell:
        assert shell.stdout.readline() == b"trains\n"
        while Path(f"/proc/{shell.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)  # until the shell waits: before, it may not know yet whom to tell
        shell.send_signal(getattr(signal, f"SIG{told}"))
        assert shell.communicate(timeout=60)[0] == b"left\nrequeue 7\n"


def test_every_public_name_is_documented():
    documented = set(re.findall(r"autoclass:: lightning_hiercomm\.(\w+)$", "\n".join(map(Path.read_text, PAGES)), re.M))
    assert documented == set(lightning_hiercomm.__all__)


def test_every_folder_of_examples_has_a_readme_and_pictures_are_shown_and_small():
    folders = {path.parent for path in (CHECKOUT / "examples").glob("*/*.*") if path.parent.name != "__pycache__"}
    assert folders == {page.parent for page in EXAMPLES} - {CHECKOUT / "examples"}
    pictures = list((CHECKOUT / "examples").glob("*/picture.png"))
    assert pictures
    for picture in pictures:
        assert "](picture.png)" in (picture.parent / "README.md").read_text()
        assert picture.stat().st_size < 100_000


def test_every_scheme_has_a_card_and_a_row_in_both_tables_of_choice():
    assert {page.stem for page in PAGES if page.parent.name == "schemes"} == set(SCHEMES)
    choosing = (CHECKOUT / "docs" / "choosing.md").read_text()
    for name, scheme in SCHEMES.items():
        assert f"| [`{scheme.__name__}`](schemes/{name}.md) | `{name}` |" in choosing
        assert f"| `{scheme.__name__}(" in README.read_text()


@pytest.mark.long("Sphinx reads the whole site")
@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-d", str(tmp_path / "trees")]
    command = [sys.executable, "-m", "sphinx", *options, str(CHECKOUT / "docs"), str(tmp_path / "html")]
    built = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert built.returncode == 0, built.stderr
    for name in lightning_hiercomm.__all__:
        pages = (tmp_path / "html").rglob("*.html")
        assert any(f'id="lightning_hiercomm.{name}"' in page.read_text() for page in pages), name
