"""Write docs/configuration.md, every key of a TOML file, from the dataclasses of configs/schema.py.

    python -m tools.configuration_page

The meaning of a key is its comment there, in the same line or above; a test holds the page against the schema.
"""

import dataclasses
import inspect
import json
import re
from pathlib import Path

from configs import schema

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
HEAD = """# Every key of a configuration

Written by `python -m tools.configuration_page` from `configs/schema.py`. A TOML file sets `key` in the table
`[section]`; `--section.key value` on the command line wins over it. On resume: *refused* keys must stay as the
checkpoint has them, *free* ones act from the next step on and are named at the start, the rest changes no number.
"""


def comments(section: type) -> dict[str, str]:
    """Key -> its comment, from the line of the field or the comment lines above it."""
    found, above = {}, []
    for line in inspect.getsource(section).splitlines():
        if comment := re.fullmatch(r"    # (.*)", line):
            above.append(comment[1])
        elif field := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
            found[field[1]] = field[2] or " ".join(above)
            above = []
    return found


def kind(annotation: str) -> str:
    """The type as a person writes it: the choices of a Literal, else its name."""
    choices = re.fullmatch(r"Literal\[(.*)\]", annotation)
    return choices[1].replace('"', "`") if choices else annotation


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    resume = {key: group for group, keys in schema.ON_RESUME.items() for key in keys.split()}
    for section in dataclasses.fields(schema.Config):
        if section.name == "dry_run":  # for the command line
            continue
        table = section.default_factory
        lines += [f"## [{section.name}]\n", "| key | type | default | on resume | meaning |", "|---|---|---|---|---|"]
        meaning = comments(table)
        for key in dataclasses.fields(table):
            group = resume[f"{section.name}.{key.name}"].replace("no matter", "-")
            cells = (f"`{key.name}`", kind(key.type), f"`{json.dumps(key.default)}`", group, meaning[key.name])
            lines.append("| " + " | ".join(re.sub(r"([|<])", r"\\\1", cell) for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
