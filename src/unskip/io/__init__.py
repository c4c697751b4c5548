"""Networks from files and names, and files of networks."""

from unskip.io.graph import register_layer
from unskip.io.load import LoadedModel, load, load_model
from unskip.io.network_file import save

__all__ = ["LoadedModel", "load", "load_model", "register_layer", "save"]
