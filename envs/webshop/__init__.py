"""WebShop-v0: search a shop, look at products, choose options, buy the wanted one; no other room enters."""
