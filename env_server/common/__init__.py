"""What every room uses: settings, requests, the event loop, and what is counted and logged; all rooms enter."""
