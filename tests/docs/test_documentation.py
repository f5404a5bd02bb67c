"""The README and the documentation: code and names that they show exist, links lead somewhere, and the site builds."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lightning_hiercomm
from lightning_hiercomm.__main__ import main
from lightning_hiercomm.schemes import SCHEMES
from lightning_hiercomm.trainer.settings import constructor_arguments

CHECKOUT = Path(__file__).resolve().parents[2]
DOCS = CHECKOUT / "docs"
README = CHECKOUT / "README.md"
EXAMPLES = sorted((CHECKOUT / "examples").rglob("README.md"))
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
OUTSIDE = [CHECKOUT / name for name in ("CONTRIBUTING.md", "GOVERNANCE.md", "RELEASING.md", "SECURITY.md")]
ALL = [README, *OUTSIDE, *PAGES, *EXAMPLES]


def arguments_of(name: str) -> set[str]:
    """Return the arguments of a public class, with those that it passes to its bases."""
    return set(constructor_arguments(getattr(lightning_hiercomm, name)))


def of_page(page: Path) -> str:
    return str(page.relative_to(CHECKOUT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_readme_is_short_and_shows_the_quickstart_as_it_runs():
    text = README.read_text()
    assert len(text.splitlines()) <= 120
    assert len((CHECKOUT / "examples" / "quickstart.py").read_text().splitlines()) <= 25
    assert "<!-- generated: file / examples/quickstart.py -->" in text


@pytest.mark.parametrize("page", ALL, ids=of_page)
def test_a_page_is_complete_without_the_site(page):
    """Plain viewers of Markdown show directives and substitutions as text."""
    assert re.findall(r"^ *[`:]{3,}\{.*|\{\{.*|^\(\S+\)=$", page.read_text(), re.M) == []


@pytest.mark.parametrize("page", ALL, ids=of_page)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [page for page in ALL if blocks(page, "python")], ids=of_page)
def test_python_blocks_use_names_and_arguments_that_exist(page):
    for block in blocks(page, "python"):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_hiercomm"):
                if node.module == "lightning_hiercomm.schemes.quadratic":
                    continue  # the page on adding a scheme writes this module
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in lightning_hiercomm.__all__:
                keywords = {keyword.arg for keyword in node.keywords} - {None}
                assert keywords <= arguments_of(node.func.id), ast.unparse(node)


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_code_in_text_names_arguments_that_exist(page):
    names = "|".join(lightning_hiercomm.__all__)
    for call in re.findall(rf"`((?:{names})\([^`]*\))`", page.read_text()):
        tree = ast.parse(call.replace("...", "None"), mode="eval").body
        keywords = {keyword.arg for keyword in tree.keywords} - {None}
        assert keywords <= arguments_of(tree.func.id), call


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_commands_take_the_flags_that_a_page_shows(page, capsys):
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            _, found, command = line.partition("-m lightning_hiercomm ")
            words = shlex.split(command, comments=True) if found else []
            if len(words) > 1 and words[0] != "COMMAND":
                with pytest.raises(SystemExit):
                    main([words[0], "--help"])
                known = capsys.readouterr().out
                assert [word for word in words[1:] if word.startswith("--") and word not in known] == []


def test_command_line_page_shows_the_help_of_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    (\w+)\b", capsys.readouterr().out, re.M)
    page = (DOCS / "reference" / "cli.md").read_text()
    assert [command for command in commands if f"<!-- generated: help / {command} -->" not in page] == []


def test_metrics_page_lists_every_scalar_of_the_monitor():
    def scalars(text: str) -> set[str]:
        return set(re.findall(r"``?(hiercomm/\w+)``?", text))

    page = (DOCS / "reference" / "metrics.md").read_text()
    assert scalars(inspect.getdoc(lightning_hiercomm.CommunicationMonitor) or "") <= scalars(page)


def test_slurm_job_of_an_elastic_node_is_requeued_before_its_time_is_up(tmp_path):
    """SLURM requeues jobs that it preempts, but not those whose program ended or whose time is over."""
    (job,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (DOCS / "howto/slurm.md").read_text(), re.DOTALL)
    (sent,) = re.findall(r"--signal=B:(\w+)@", job)
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
            time.sleep(0.01)  # until the shell waits: before, it may not have set its trap
        shell.send_signal(getattr(signal, f"SIG{sent}"))
        assert shell.communicate(timeout=60)[0] == b"left\nrequeue 7\n"


def test_every_public_name_is_documented():
    pages = "\n".join(map(Path.read_text, PAGES))
    marks = re.findall(r"generated: reference / lightning_hiercomm\.(\w+) (.*)-->", pages)
    assert sorted({*marks}) == sorted(marks)
    assert sorted({name for name, _ in marks}) == sorted(lightning_hiercomm.__all__)


def test_every_scheme_has_a_page_and_is_in_the_table_of_choice():
    assert {page.stem for page in (DOCS / "reference" / "schemes").glob("*.md")} == set(SCHEMES)
    choosing = (DOCS / "howto" / "choose_a_scheme.md").read_text()
    for name, scheme in SCHEMES.items():
        assert f"| [`{scheme.__name__}`](../reference/schemes/{name}.md) | `{name}` |" in choosing
        assert f"`{scheme.__name__}(" in README.read_text()


def test_docstring_of_each_class_that_users_construct_shows_an_example():
    classes = {name: each for name, each in vars(lightning_hiercomm).items() if isinstance(each, type)}
    constructed = sorted({*classes} & {*lightning_hiercomm.__all__} - {"Scheme", "Topology"})
    assert [name for name in constructed if "::\n" not in (classes[name].__doc__ or "")] == []


@pytest.mark.nightly  # a push builds it in a job of its own
@pytest.mark.long("Sphinx reads the whole site")
@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path):
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-d", str(tmp_path / "trees")]
    command = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(tmp_path / "html")]
    built = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert built.returncode == 0, built.stderr
    html = "\n".join(page.read_text() for page in (tmp_path / "html").rglob("*.html"))
    assert "{{" not in html
    assert "<!-- generated" in html  # as a comment, which browsers do not show
