"""The model that an engine serves: a model directory comes in, a model to call goes out.

``model_loader`` loads mlx_lm's unedited code with some names bound to labkit's functions
(``isolated_model_modules``), and gives each layer a ``layer_cache``. ``dtype_resolution`` decides
what the model computes in.
"""
