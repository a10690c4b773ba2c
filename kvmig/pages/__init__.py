"""The page at /ui/: templates, static files, and what all its routes share.

The page has no state of its own. It calls the HTTP API's routes in the same process
(`api_calls`), with the rights of the person who is logged in (`session`), and renders their
answers (`rendering`). The routes are where the APIs are: in `kvmig.fleet.pages` and
`kvmig.frontend.server_pages`.

`static/htmx.min.js` is htmx.org 2.0.11 from the npm registry, unchanged (BSD Zero Clause License).
"""
