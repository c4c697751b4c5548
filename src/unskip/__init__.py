"""unskip: very deep networks without skip connections. Build them, train them, see why they train, ship them."""

from unskip.doctor import diagnose
from unskip.models import create_model
from unskip.ship import export, fold, verify
from unskip.surgery import plainify
from unskip.train import param_groups

__version__ = "0.1.0.dev0"
__all__ = ["create_model", "diagnose", "export", "fold", "param_groups", "plainify", "verify"]
