"""What the code and the documents point at exists: sections that docstrings cite, files, and headings behind links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("tools", "serving", "eplb", "model", "sharding", "pallas_kernels", "tests")
DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))

# `docs/NAME.md, "Title" and "Title"`, wherever a docstring or a comment breaks the line.
_GAP = r"[\s#]+"
_CITATION = re.compile(rf'docs/([\w.-]+\.md)((?:,{_GAP}|{_GAP}and{_GAP}|,?{_GAP}and{_GAP})"[^"\n]+")*')
_TITLE = re.compile(r'"([^"]+)"')
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def citations_in(source: str) -> Iterator[tuple[str, str | None]]:
    """(document, title) of every citation in a file; the title is None where the document alone is named."""
    for match in _CITATION.finditer(source):
        titles = _TITLE.findall(match[0])
        yield from ((match[1], title) for title in titles or [None])


def headings_of(document: Path) -> list[str]:
    """Titles of all sections, code blocks left out."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)


def anchor(heading: str) -> str:
    """The fragment by which a heading is linked to."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def source_files() -> list[Path]:
    """Every Python file of the rooms and their tests."""
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py") if path != Path(__file__))


def test_every_cited_section_exists() -> None:
    cited = {
        (path.relative_to(ROOT), document, title)
        for path in source_files()
        for document, title in citations_in(path.read_text(encoding="utf-8"))
    }
    headings = {document.name: headings_of(document) for document in DOCUMENTS if document.parent.name == "docs"}
    dead = [entry for entry in cited if entry[1] not in headings or (entry[2] and entry[2] not in headings[entry[1]])]
    assert sorted(map(str, dead)) == []
    assert len({title for _, document, title in cited if document == "model.md" and title}) >= 15


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    dead = []
    for link in _LINK.findall(_CODE.sub("", document.read_text(encoding="utf-8"))):
        if re.match(r"https?://", link):
            continue
        name, _, fragment = unquote(link).partition("#")
        target = document.parent / name if name else document
        known = target.exists() and (not fragment or fragment in map(anchor, headings_of(target)))
        if not known:
            dead.append(link)
    assert dead == []


def test_no_section_title_stands_twice() -> None:
    titles = headings_of(ROOT / "docs" / "model.md")
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('Formula: docs/model.md, "Attention".', [("model.md", "Attention")]),
        ('docs/model.md,\n    "Attention"', [("model.md", "Attention")]),
        ('# see docs/model.md,\n# "Gate" and\n# "Experts"', [("model.md", "Gate"), ("model.md", "Experts")]),
        ('docs/model.md, "Gate" and "Experts", a "word"', [("model.md", "Gate"), ("model.md", "Experts")]),
        ("docs/decisions.md says why", [("decisions.md", None)]),
    ],
)
def test_citations_are_found(source: str, found: list[tuple[str, str | None]]) -> None:
    assert list(citations_in(source)) == found
