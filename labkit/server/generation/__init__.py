"""From prompts to tokens: encoding, the engine's thread, and the outputs of live requests.

In: a request's messages and parameters. Out: outputs as they are generated, and metrics of them.
"""
