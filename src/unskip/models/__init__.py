"""Networks by name. Importing this package registers them, with timm too."""

from unskip.models import gpt, named, plainnet, seqnet, simplified  # noqa: F401 - registers the names
from unskip.models.about import OTHERS, About, Other, about, list_models
from unskip.models.equivalence import to_plain, to_residual
from unskip.models.registry import ENTRIES, Entry, create_model
from unskip.models.simplified import dominant_paths

__all__ = [
    "ENTRIES",
    "OTHERS",
    "About",
    "Entry",
    "Other",
    "about",
    "create_model",
    "dominant_paths",
    "list_models",
    "to_plain",
    "to_residual",
]
