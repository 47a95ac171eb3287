"""WebShop-v0: search a shop, look at products, choose options, buy the wanted one; nothing else imports it."""
