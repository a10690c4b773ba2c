"""Templates become HTML. All values are escaped; a name that a template lacks is an error."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvmig import __version__
from kvmig.accounts.page_sessions import PATH as PREFIX
from kvmig.pages.words import FILTERS, percent_of

__all__ = ["PREFIX", "render", "render_macro"]


def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("kvmig.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= FILTERS
    found.globals |= {"ui": PREFIX, "version": __version__, "percent_of": percent_of}
    return found


_TEMPLATES = _environment()


def render(template: str, **values: object) -> str:
    """The HTML of a template. template: a file of `templates/`, without `.html`."""
    return _TEMPLATES.get_template(f"{template}.html").render(values)


def render_macro(template: str, macro: str, *values: object) -> str:
    """The HTML of a macro of a template."""
    return str(getattr(_TEMPLATES.get_template(f"{template}.html").module, macro)(*values))
