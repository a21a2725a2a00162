"""For the reference: two habits of our docstrings that griffe would misread. Named in mkdocs.yml.

* The examples that end them, `>>> ...`, become their section "Examples". As Markdown, `>` would begin a quotation.
* "Returns:" is prose, as written. Griffe would take what stands before a colon in it for a name or a type.
"""

from __future__ import annotations

import re
from textwrap import dedent, indent
from typing import Any

from griffe import Extension, Object

RETURNS = re.compile(r"^(Returns|Yields):\n((?:(?:[ ]+.*)?\n)+)", re.MULTILINE)


class Docstrings(Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:  # noqa: ARG002 - griffe passes more than is used here
        """Called once for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = for_griffe(obj.docstring.value)


def for_griffe(text: str) -> str:
    """The docstring with "Returns:" as a paragraph, and everything from its first example on under "Examples:"."""
    text = RETURNS.sub(lambda found: f"**{found[1]}:** {dedent(found[2]).strip()}\n\n", text + "\n")
    before, mark, examples = text.partition("\n>>> ")
    return f"{before}\n\nExamples:\n{indent('>>> ' + examples, '    ')}" if mark else text
