"""Networks by name. Importing this package registers them, with timm too."""

from unskip.models import named, plainnet  # noqa: F401 - registers the names
from unskip.models.about import About, about
from unskip.models.registry import ENTRIES, Entry, create_model

__all__ = ["ENTRIES", "About", "Entry", "about", "create_model"]
