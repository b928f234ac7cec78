# SPDX-License-Identifier: Apache-2.0
"""Sphinx's configuration for the documentation site, which `make docs` builds.

The source directory is the root of the repository: documents stay where readers of the repository
expect them, and links between them work in both places.
"""

import sys
from pathlib import Path

from sphinx.application import Sphinx

import normscope

sys.path.insert(0, str(Path(__file__).parent))

project = "normscope"
version = release = normscope.__version__
copyright = "the authors of normscope"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "cpp_headers"]

root_doc = "docs/site/index"
include_patterns = [
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/**.md",
    "docs/site/**.rst",
    "examples/README.md",
]
exclude_patterns = [".*", "build"]

myst_heading_anchors = 4  # the anchors that GitHub and other hosts give to headings

autodoc_mock_imports = ["transformers"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
maximum_signature_line_length = 80
napoleon_custom_sections = ["Shape"]
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Every reference in a docstring must lead somewhere, except those to other libraries, whose
# inventories would have to be downloaded.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(collections|contextlib|lightning|os|torch|transformers|typing)\..+"),
    # Names in annotations: types of torch and Python that are not imported at run time, type
    # variables and Literals.
    (
        r"py:class",
        r"(normscope\.[\w.]+\.)?"
        r"(Activation|Batch|DeviceMesh|Layer|Model|Patterns|ProcessGroup|SliceStats)",
    ),
]


def setup(app: Sphinx) -> None:
    """Connect the handlers below."""
    app.connect("autodoc-process-docstring", keep_asterisks)
    app.connect("autodoc-process-signature", without_factories)


def keep_asterisks(*arguments: object) -> None:
    """Escape the asterisk of shapes such as [N, C, *], which would begin emphasis."""
    lines = arguments[-1]
    assert isinstance(lines, list)
    lines[:] = [line.replace(", *]", r", \*]") for line in lines]


def without_factories(*arguments: object) -> tuple[str | None, str | None]:
    """Replace the default of a dataclass's field that has a factory, which is no expression.

    Sphinx cuts a signature that it cannot parse at each comma, also at those of a type.
    """
    signature, returned = arguments[-2:]
    assert signature is None or isinstance(signature, str)
    assert returned is None or isinstance(returned, str)
    return signature and signature.replace("<factory>", "..."), returned


html_theme = "furo"
html_title = f"normscope {release}"
html_copy_source = False
html_show_sourcelink = False
html_additional_pages = {"index": "redirect.html"}
templates_path = ["_templates"]
