"""What the site shows beside its own files: files of other folders, config reference, and examples."""

import ast
import base64
import os
import re
from pathlib import Path

from config_reference import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pointproj.viz.scenes import viewer

PROJECT = Path(__file__).resolve().parent.parent
DOCS = PROJECT / "docs"

# File of the project -> its page of the site.
PAGES = {
    PROJECT / "benchmarks/README.md": "benchmarks/README.md",
    PROJECT / "benchmarks/tables.md": "benchmarks/tables.md",
    PROJECT / "CONTRIBUTING.md": "contribute/index.md",
}
PICTURES = {path: f"benchmarks/{path.name}" for path in sorted((PROJECT / "benchmarks").glob("*.png"))}

CONFIG = """# Config reference

Every value that a run reads, with its type, default and meaning. On the command line `KEY=VALUE` sets a
value, and `GROUP=CHOICE` makes a choice. Lengths are in units of the query cube.

"""

EXAMPLES = """# Examples

Short scripts from the folder `examples/`. Each runs without changes: `python examples/NAME.py`.
"""


def examples() -> str:
    """Each script under its name: what it says of itself first, then the code."""
    page = EXAMPLES
    for file in sorted((PROJECT / "examples").glob("*.py")):
        source = file.read_text(encoding="utf-8")
        said = ast.get_docstring(ast.parse(source)).replace("``", "`")
        code = source.split('"""', 2)[2].strip()
        page += f"\n## {file.stem.replace('_', ' ').capitalize()}\n\n{said}\n\n"
        page += f'```python title="{file.name}"\n{code}\n```\n'
    return page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages and pictures from other folders, the config reference, the examples, and views that turn."""
    files.append(File.generated(config, "train/config.md", content=CONFIG + reference(PROJECT / "conf")))
    files.append(File.generated(config, "examples.md", content=examples()))
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=source.read_text(encoding="utf-8")))
    for picture, place in PICTURES.items():
        files.append(File.generated(config, place, abs_src_path=str(picture)))
    before, behind = viewer()
    for scene in sorted((DOCS / "views").glob("*.glb")):
        view = before + base64.b64encode(scene.read_bytes()).decode() + behind
        files.append(File.generated(config, f"views/{scene.stem}.html", content=view))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the project into links between pages of the site."""
    place = page.file.src_uri
    source = next((file for file, target in PAGES.items() if target == place), DOCS / place)

    def of_the_site(link: re.Match) -> str:
        file = (source.parent / link[1]).resolve()
        if file.parent == PROJECT / "examples":
            return f"]({os.path.relpath('examples.md', Path(place).parent)}#{file.stem.replace('_', '-')})"
        target = (PAGES | PICTURES).get(file) or (
            file.relative_to(DOCS) if file.is_relative_to(DOCS) else link[1]
        )
        return f"]({os.path.relpath(target, Path(place).parent)}{link[2] or ''})"

    return re.sub(r"\]\(([^)#:]+)(#[^)]*)?\)", lambda link: of_the_site(link), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show the Sphinx roles of docstrings as plain code."""
    return re.sub(r":(?:attr|class|data|func|meth|mod):(<code>)", r"\1", html)
