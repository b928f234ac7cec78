# SPDX-License-Identifier: Apache-2.0
"""What scopes cost: predicted for machines that are not at hand, and measured on those that are.

docs/scaling.md describes the model.
"""

from normscope.costs.measurement import measure
from normscope.costs.model import Costs
from normscope.costs.prediction import LayerPrediction, Prediction, predict

__all__ = ["Costs", "LayerPrediction", "Prediction", "measure", "predict"]
