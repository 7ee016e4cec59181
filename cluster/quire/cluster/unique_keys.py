"""Parses users' YAML and JSON, and refuses mappings in which a key occurs twice.

The parsers themselves take a key's last value: a setting changed in the first of two places would
have no effect, without any message.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml


def read_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        ValueError: The text is not YAML, or a key occurs twice in a mapping; the message has both
            lines.
    """
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        if found := repeated_key(root):
            first, second = (node.start_mark.line + 1 for node in found)
            raise ValueError(f"{found[0].value!r} stands twice, in lines {first} and {second}")
        return loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    finally:
        loader.dispose()


def repeated_key(root: "yaml.Node") -> "tuple[yaml.Node, yaml.Node] | None":
    """The first two nodes with the same key in a mapping below ``root``; ``None`` if no key occurs
    twice. Call this before a value is constructed, which merges ``<<`` into the nodes."""
    import yaml

    seen: set[int] = set()  # A node with aliases is reached several times.
    left = [root]
    while left:
        node = left.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        if not isinstance(node, yaml.MappingNode):
            left += node.value
            continue
        places: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and places.setdefault(key.value, key) is not key:
                return places[key.value], key
            left.append(value)
    return None


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: The text is not JSON, or a key occurs twice in an object.
        RecursionError: The text is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_mapping)


def _mapping(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"{key[:64]!r} stands twice in an object")
        made[key] = value
    return made
