"""A small GPT, trained on the source code of Python's standard library. Run it with `python -m examples.gpt`.

data.py     the corpus: which bytes, in which order
model.py    the network, in Flax NNX around jaxflash's attention module
train.py    optimizer, training step, the loop, checkpoints
sample.py   text from the trained model, through the key-value cache
report.py   what a run leaves behind: losses, a plot, which attention implementation ran
"""
