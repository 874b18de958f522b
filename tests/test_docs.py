"""The pages in docs/ and the code that they speak of hold each other."""

import re
import subprocess
from pathlib import Path

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
