"""The conformance suite of the Engine port: run it on an adapter of your own.

    pytest --pyargs kvmig.testing --engine my.module:factory

`factory()` makes an engine (`kvmig.testing.subject.EngineUnderTest`); the suite makes two and
moves requests between them. See docs/own-engine.md.
"""
