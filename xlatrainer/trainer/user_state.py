"""`UserState`: what a subclass of Trainer keeps in attributes of its own, for replay to watch.

A step that is replayed without its Python must see when something it depends on has changed, and only that: the
Trainer's own counters change in every step.
"""

from typing import Any

__all__ = ["UserState"]


class UserState:
    """A dict of the attributes of `owner` that are not the Trainer's, brought up to date around each step.

    Args:
        owner: The Trainer.

    Attributes:
        attributes: The attributes by name, always the same dict.
        read: Numbers of the Trainer that a step has read ("step", "learning_rate"): it depends on them from then on.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._own: frozenset[str] = frozenset()
        self.attributes: dict[str, Any] = {}
        self.read: set[str] = set()
        self.recording = False

    def exclude(self, names: frozenset[str]) -> None:
        """Leave out these attributes: the Trainer's own."""
        self._own = names

    def gather(self) -> None:
        """Bring `attributes` to what the owner has."""
        now = {name: value for name, value in vars(self._owner).items() if name not in self._own}
        now.update((f"the Trainer's {name}", getattr(self._owner, name)) for name in sorted(self.read))
        for name in [name for name in self.attributes if name not in now]:
            del self.attributes[name]
        self.attributes.update(now)

    def hand_back(self) -> None:
        """Give the owner what a replayed step has put into `attributes`."""
        held = vars(self._owner)
        for name, value in self.attributes.items():
            if name in held and held[name] is not value:
                held[name] = value
