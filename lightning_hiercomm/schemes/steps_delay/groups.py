"""The user's param groups: which of their values a scheduler, a callback or the user has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from torch.optim import Optimizer

from lightning_hiercomm.schemes.optimizer_state import changed, copied, plain_values_of, values_of
from lightning_hiercomm.schemes.steps_delay.shards import Hyperparameters, like_present


class UserGroups:
    """The user's param groups, of which the server follows only what anyone but the optimizer itself changes.

    An optimizer may count or adapt values in its param groups. The server's optimizers do that for themselves, and the
    user's also does it in its steps without gradients.

    Args:
        optimizer: The user's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known = self._present()

    def _present(self) -> Hyperparameters:
        return list(map(values_of, self._optimizer.param_groups))

    def _pending(self) -> Hyperparameters:
        present = self._present()
        known = [*self._known, *({} for _ in present[len(self._known) :])]
        return [changed(before, after) for before, after in zip(known, present, strict=False)]

    def changes(self) -> Hyperparameters:
        """Return the values that have changed outside of the optimizer's own step since the last call, by group."""
        changes = self._pending()
        self._known = self._present()
        return changes

    def step(self, own_step: Callable[[], object]) -> Hyperparameters:
        """Call the user's step; return the changes that precede the optimizer's own code, those of its hooks included.

        Changes of hooks that follow it count for the next step, as they do without the server.
        """
        changes, depth = self.changes(), 0

        def before(*_: object) -> None:
            nonlocal depth
            depth += 1
            if depth == 1:  # deeper ones are steps of base classes
                for own, more in zip(changes, self.changes(), strict=True):
                    own.update(more)

        def after(*_: object) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0:
                self._known = self._present()

        with ExitStack() as hooks:
            has_hooks = False
            with suppress(AttributeError):  # of an optimizer that has not called the constructor of torch's
                hooks.enter_context(self._optimizer.register_step_pre_hook(before))
                first = hooks.enter_context(self._optimizer.register_step_post_hook(after))
                post_hooks: Any = first.hooks_dict_ref()
                post_hooks.move_to_end(first.id, last=False)
                has_hooks = True
            own_step()
        if not has_hooks:
            self._known = self._present()
        return changes

    def merged(self, of_server: Mapping[int, Mapping[str, Any]]) -> Hyperparameters:
        """Return the values of the server's optimizers, with changes that the server does not have yet."""
        return [{**of_server.get(index, {}), **changes} for index, changes in enumerate(self._pending())]

    def take(self, of_server: Mapping[int, Mapping[str, Any]]) -> None:
        """Write :meth:`merged` to the user's param groups."""
        for group, values in zip(self._optimizer.param_groups, self.merged(of_server), strict=True):
            group.update(copied(values))

    def state_dict(self) -> Hyperparameters:
        """Return the values that the server has."""
        return list(map(plain_values_of, self._known))

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore :meth:`state_dict`; the user's optimizer has been restored before."""
        present = self._present()
        saved = zip(state, present, strict=False)
        self._known = [{**values, **like_present(known, values)} for known, values in saved] + present[len(state) :]
