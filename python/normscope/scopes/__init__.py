# SPDX-License-Identifier: Apache-2.0
"""Sets the scopes of layers: by hand, by a schedule, or as measurements recommend."""

from normscope.layers.scope import Scope
from normscope.scopes.plan import Candidate, LayerPlan, ScopePlan
from normscope.scopes.recommendation import recommend_scopes
from normscope.scopes.schedule import ProgressiveScope, set_scope

__all__ = [
    "Candidate",
    "LayerPlan",
    "ProgressiveScope",
    "Scope",
    "ScopePlan",
    "recommend_scopes",
    "set_scope",
]
