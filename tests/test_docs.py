"""The pages in docs/ and the code that they speak of hold each other."""

import re
import subprocess
from pathlib import Path

from tools import configuration_page

REPO = Path(__file__).resolve().parent.parent


def test_every_cited_device_fact_is_there_and_every_fact_is_cited():
    files = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    texts = {f: (REPO / f).read_text() for f in files.split("\0") if f.endswith((".py", ".sh", ".toml", ".md"))}
    page = texts.pop("docs/device_facts.md")
    facts = re.findall(r"^### (.+)$", page, flags=re.MULTILINE)
    cited = {name for text in texts.values() for name in re.findall(r"device_facts#([a-z0-9-]+)", text)}
    assert len(facts) == len(set(facts)) > 20
    assert set(facts) == cited
    for fact in page.split("\n### ")[1:]:  # each says how sure it is, and where to look it up
        assert re.search(r"\*[^*]*\b(documented|measured|assumed)\b[^*]+\.\*", fact.lower()), fact


def test_the_configuration_page_is_what_the_schema_says():
    """Run `python -m tools.configuration_page` after a change; every key has a meaning."""
    page = configuration_page.PAGE.read_text(encoding="utf-8")
    assert page == configuration_page.page()
    assert "|  |" not in page
    assert page.count("\n| `") == sum(page.count(f"| {group} |") for group in ("free", "refused", "-"))
