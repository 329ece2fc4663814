"""How each stock Flower strategy is built from our options, and what it needs of a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Strategy

from strategies.options import StrategyError, StrategyOptions, cannot_be_made

# The view of a task holds exactly the clients to train, so that a stock strategy takes all and waits for none.
TAKE_ALL: Mapping[str, Any] = {
    "fraction_train": 1.0,
    "fraction_evaluate": 0.0,
    "min_train_nodes": 1,
    "min_evaluate_nodes": 1,
    "min_available_nodes": 1,
}
TRAIN_LOSS_KEY = "train_loss"


@dataclass(frozen=True, kw_only=True)
class StockRecipe:
    """One stock strategy: `build` makes an instance for one task, `min_replies` says what it needs to aggregate."""

    name: str
    build: Callable[[StrategyOptions], Strategy]
    min_replies: Callable[[StrategyOptions], int] = lambda options: 1
    needs_loss: bool = False


def _eta(options: StrategyOptions, key: str = "eta") -> dict[str, Any]:
    """The server's step size, where it is not the strategy's own default."""
    return {key: options.server_learning_rate} if options.server_learning_rate else {}


def _adaptive(kind: Callable[..., Strategy], *, moments: bool = True) -> Callable[[StrategyOptions], Strategy]:
    def build(options: StrategyOptions) -> Strategy:
        betas = {"beta_1": options.beta_1, "beta_2": options.beta_2} if moments else {}
        return kind(**TAKE_ALL, **_eta(options), eta_l=options.client_learning_rate, tau=options.tau, **betas)

    return build


def _krum_replies(options: StrategyOptions) -> int:
    """Blanchard et al., NeurIPS 2017: 2 f + 3 replies withstand f liars. Without liars any number can be ranked."""
    return 2 * options.num_malicious_nodes + 3 if options.num_malicious_nodes else 1


def _bulyan_replies(options: StrategyOptions) -> int:
    """El Mhamdi et al., ICML 2018: 4 f + 3 replies."""
    return 4 * options.num_malicious_nodes + 3


_RECIPES = (
    StockRecipe(name="fedavg", build=lambda options: flower.FedAvg(**TAKE_ALL)),
    StockRecipe(
        name="fedavgm",
        build=lambda options: flower.FedAvgM(
            **TAKE_ALL, **_eta(options, "server_learning_rate"), server_momentum=options.server_momentum
        ),
    ),
    StockRecipe(name="fedadagrad", build=_adaptive(flower.FedAdagrad, moments=False)),
    StockRecipe(name="fedadam", build=_adaptive(flower.FedAdam)),
    StockRecipe(name="fedyogi", build=_adaptive(flower.FedYogi)),
    StockRecipe(name="fedprox", build=lambda options: flower.FedProx(**TAKE_ALL, proximal_mu=options.proximal_mu)),
    StockRecipe(name="fedmedian", build=lambda options: flower.FedMedian(**TAKE_ALL)),
    StockRecipe(
        name="fedtrimmedavg", build=lambda options: flower.FedTrimmedAvg(**TAKE_ALL, beta=options.trim_fraction)
    ),
    StockRecipe(
        name="krum",
        build=lambda options: flower.Krum(**TAKE_ALL, num_malicious_nodes=options.num_malicious_nodes),
        min_replies=_krum_replies,
    ),
    StockRecipe(
        name="multikrum",
        build=lambda options: flower.MultiKrum(
            **TAKE_ALL,
            num_malicious_nodes=options.num_malicious_nodes,
            num_nodes_to_select=options.num_nodes_to_select,
        ),
        min_replies=_krum_replies,
    ),
    StockRecipe(
        name="bulyan",
        build=lambda options: flower.Bulyan(**TAKE_ALL, num_malicious_nodes=options.num_malicious_nodes),
        min_replies=_bulyan_replies,
    ),
    StockRecipe(
        name="qfedavg",
        build=lambda options: flower.QFedAvg(
            options.client_learning_rate, q=options.q, train_loss_key=TRAIN_LOSS_KEY, **TAKE_ALL
        ),
        needs_loss=True,
    ),
)
STOCK_RECIPES: Mapping[str, StockRecipe] = {recipe.name: recipe for recipe in _RECIPES}


def own_recipe(name: str, found: type[Strategy]) -> StockRecipe:
    """A recipe for a user's own Flower strategy. Its `build` raises StrategyError where that needs more arguments."""
    arguments = TAKE_ALL if issubclass(found, FedAvg) else {}

    def build(options: StrategyOptions) -> Strategy:
        try:
            return found(**arguments)
        except Exception as error:  # the user's constructor may fail in any way
            raise StrategyError(cannot_be_made(name, error)) from error

    return StockRecipe(name=name, build=build)
