"""Turns the pages of the repository into notebooks: each `python` block becomes a cell that the build of the site executes.

A page stays plain Markdown, which any viewer of Markdown shows. What a block needs and a reader does not, such as a small model, stands
before it in a comment that begins with a line `<!-- hidden`. Of a comment `<!-- output`, readers of the site see the result alone.
"""

import re

LANGUAGES = frozenset({"python", "sh", "text", "yaml", "toml", "json"})
"""The languages of blocks: cells are `python`; all others are shown as they stand."""

_FRONT_MATTER = """---
file_format: mystnb
kernelspec:
  name: python3
---

"""
_VISIBLE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"^<!-- (hidden|output)\n(.*?)^-->$", re.DOTALL | re.MULTILINE)
_TAGS = {"hidden": "remove-cell", "output": "remove-input"}
_FENCE = re.compile(r"^[ >]*```(.*)$", re.MULTILINE)


def python_blocks(text: str) -> list[str]:
    """Returns the visible Python blocks of a page, in their order."""
    return _VISIBLE.findall(text)


def cells_of(text: str) -> list[str]:
    """Returns all that runs for a page, hidden cells included, in their order."""
    found = [*_VISIBLE.finditer(text), *_COMMENT.finditer(text)]
    return [match.groups()[-1] for match in sorted(found, key=lambda match: match.start())]


def languages_of(text: str) -> list[str]:
    """Returns the language of each block of a page, "" where it has none."""
    return [language.strip() for language in _FENCE.findall(text)[::2]]


def as_notebook(text: str) -> str:
    """Returns a page as the text notebook that MyST-NB executes; a page without Python as it is."""
    if not cells_of(text):
        return text
    text = _COMMENT.sub(lambda found: f"```{{code-cell}} ipython3\n:tags: [{_TAGS[found[1]]}]\n\n{found[2]}```", text)
    return _FRONT_MATTER + _VISIBLE.sub("```{code-cell} ipython3\n\\1```", text)
