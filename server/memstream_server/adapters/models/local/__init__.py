"""Local embedding models: the table of known models, their installation, and the directory that holds them.

catalog: the known models with the published SHA-256 of their files.
store: the models directory: installed models, their lock, removal.
sources: a model's published files, from a package or a directory, verified.
downloads: downloads a package with pip or Maven.
published_weights: the weights in a published file.
bert_graph: builds the ONNX files from the weights.
install: the steps of an installation.
"""
