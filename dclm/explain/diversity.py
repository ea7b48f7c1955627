"""`dclm explain diversity`."""

from dctrain.explain import diversity_command

from ..load import load_decoder

diversity = diversity_command(load_decoder)
