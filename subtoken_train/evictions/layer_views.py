"""Names of ``view/view.py`` up to version 0.2; methods written for it import them from here."""

from __future__ import annotations

from subtoken_train.view.view import Need, Scope, TaskView, View

LayerView = View

__all__ = ["LayerView", "Need", "Scope", "TaskView"]
