"""What servers of these tests are started with."""

import pytest

from rollgym.trainer.learn.weights.folders import ModelLayout, WeightFolders
from rollgym.trainer.models.tiny import build_tiny_tokenizer
from tests.support.tiny_models import sharp_model
from tests.support.weight_senders import backend_of


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The model that servers are started with: another policy than any that is sent to them."""
    layout = ModelLayout(sharp_model(9), build_tiny_tokenizer())
    with WeightFolders(tmp_path_factory.mktemp("start"), layout) as folders:
        yield folders.write_start(backend_of(sharp_model(9)).export())
