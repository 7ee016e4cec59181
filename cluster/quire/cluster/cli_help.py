"""How ``--help`` shows defaults."""

import argparse


class DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults as one would type them, and none where there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or action.const is True:
            return action.help
        if isinstance(default, (list, tuple)):
            shown = " ".join(map(str, default)).replace("%", "%%")
            return f"{action.help} (default: {shown})"
        return super()._get_help_string(action)
