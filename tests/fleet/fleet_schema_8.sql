BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0008');
CREATE TABLE aliases (
	name TEXT NOT NULL, 
	model_id TEXT NOT NULL, 
	weight INTEGER NOT NULL, 
	PRIMARY KEY (name, model_id), 
	FOREIGN KEY(model_id) REFERENCES models (id)
);
INSERT INTO "aliases" VALUES('chat','01a2192614d6fe4aa10d977f4d153158',1);
CREATE TABLE api_keys (
	id TEXT NOT NULL, 
	user_id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	prefix TEXT NOT NULL, 
	hash BLOB NOT NULL, 
	terms JSON NOT NULL, 
	created DOUBLE NOT NULL, 
	revoked_at DOUBLE, 
	version INTEGER NOT NULL, origin TEXT DEFAULT '' NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(user_id) REFERENCES users (id), 
	UNIQUE (prefix)
);
INSERT INTO "api_keys" VALUES('01a2192614c92f36cefeb7920bea621d','01a2192614c20a8658aa32cf13ecc824','laptop','4jez2qq5',X'C6A55B6935B0A73CB97A70F8C8467798624C65A4AE227BC217CD9201F3DAA05F','{"rpm": null, "tpm": null, "parallel": null, "quota": null, "period": "month", "quotas": {}, "scopes": ["infer"], "models": null, "cidrs": null, "classes": null, "expires": null}',1000000.0,NULL,2,'01a2192614c92f36cefeb7920bea621d');
CREATE TABLE audit (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	at DOUBLE NOT NULL, 
	actor TEXT NOT NULL, 
	address TEXT NOT NULL, 
	action TEXT NOT NULL, 
	object TEXT NOT NULL, 
	"before" JSON, 
	"after" JSON
);
INSERT INTO "audit" VALUES(1,1000000.0,'anna','10.0.0.1','user.add','bea',NULL,'{"role": "user"}');
INSERT INTO "audit" VALUES(2,1000000.0,'anna','10.0.0.1','key.add','4jez2qq5',NULL,'{"user": "bea", "name": "laptop", "terms": {"rpm": null, "tpm": null, "parallel": null, "quota": null, "period": "month", "quotas": {}, "scopes": ["infer"], "models": null, "cidrs": null, "classes": null, "expires": null}}');
INSERT INTO "audit" VALUES(3,1000000.0,'anna','10.0.0.1','model.add','qwen',NULL,'{"name": "qwen", "source": "path:/srv/models", "engine": "vllm", "flags": [], "instances": {"min": 0, "max": 1, "target": 8.0, "target_kind": "concurrency", "zero_after_s": 300.0, "start_timeout_s": 600.0, "schedule": []}, "aliases": [], "adapters": {}, "warm": "none", "share_prefixes": false, "memory": 0, "priority": 0, "max_held": 1000, "heartbeat_after_s": 10.0}');
INSERT INTO "audit" VALUES(4,1000000.0,'anna','10.0.0.1','alias.add','chat',NULL,'{"qwen": 1}');
CREATE TABLE grants (
	source TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	key_id TEXT NOT NULL, 
	day TEXT NOT NULL, 
	tokens BIGINT NOT NULL, model TEXT DEFAULT '' NOT NULL, 
	PRIMARY KEY (source, seq)
);
CREATE TABLE meta (
	name TEXT NOT NULL, 
	value BLOB NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "meta" VALUES('pepper',X'3D41F61F8FC44BA2B14BBC7B74AE8102303B0CD5082647586DD37B1764CE0EDB95895E6DC4163FC8BE67549D1E45AE52CD99C3B323359AF8285AAC93A229A81F');
CREATE TABLE models (
	id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	revision INTEGER NOT NULL, 
	enabled BOOLEAN NOT NULL, 
	created DOUBLE NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (name)
);
INSERT INTO "models" VALUES('01a2192614d6fe4aa10d977f4d153158','qwen',1,1,1000000.0);
CREATE TABLE placement (
	id INTEGER NOT NULL, 
	wanted JSON NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE revisions (
	model_id TEXT NOT NULL, 
	n INTEGER NOT NULL, 
	spec JSON NOT NULL, 
	author TEXT NOT NULL, 
	created DOUBLE NOT NULL, 
	PRIMARY KEY (model_id, n), 
	FOREIGN KEY(model_id) REFERENCES models (id) ON DELETE CASCADE
);
INSERT INTO "revisions" VALUES('01a2192614d6fe4aa10d977f4d153158',1,'{"name": "qwen", "source": "path:/srv/models", "engine": "vllm", "flags": [], "instances": {"min": 0, "max": 1, "target": 8.0, "target_kind": "concurrency", "zero_after_s": 300.0, "start_timeout_s": 600.0, "schedule": []}, "aliases": [], "adapters": {}, "warm": "none", "share_prefixes": false, "memory": 0, "priority": 0, "max_held": 1000, "heartbeat_after_s": 10.0}','anna',1000000.0);
CREATE TABLE usage (
	source TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	call_id TEXT NOT NULL, 
	key_id TEXT NOT NULL, 
	model TEXT NOT NULL, 
	began DOUBLE NOT NULL, 
	ended DOUBLE, 
	prompt BIGINT NOT NULL, 
	output BIGINT NOT NULL, 
	sequences INTEGER NOT NULL, 
	reruns INTEGER NOT NULL, 
	ttft_ms DOUBLE, 
	status TEXT NOT NULL, cached BIGINT DEFAULT '0' NOT NULL, moves INTEGER DEFAULT '0' NOT NULL, 
	PRIMARY KEY (source, seq)
);
CREATE TABLE usage_daily (
	day TEXT NOT NULL, 
	key_id TEXT NOT NULL, 
	model TEXT NOT NULL, 
	calls BIGINT NOT NULL, 
	prompt BIGINT NOT NULL, 
	output BIGINT NOT NULL, cached BIGINT DEFAULT '0' NOT NULL, 
	PRIMARY KEY (day, key_id, model)
);
CREATE TABLE usage_pruned (
	source TEXT NOT NULL, 
	first INTEGER NOT NULL, 
	last INTEGER NOT NULL, 
	PRIMARY KEY (source, first)
);
CREATE TABLE users (
	id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	role TEXT NOT NULL, 
	disabled BOOLEAN NOT NULL, 
	created DOUBLE NOT NULL, limits JSON DEFAULT '{}' NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (name)
);
INSERT INTO "users" VALUES('01a2192614c20a8658aa32cf13ecc824','bea','user',0,1000000.0,'{"rpm": null, "tpm": null, "parallel": null, "quota": null, "period": "month", "quotas": {}}');
CREATE INDEX ix_api_keys_user_id ON api_keys (user_id);
CREATE INDEX ix_api_keys_version ON api_keys (version);
CREATE TRIGGER audit_no_update BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'rows of audit are never changed'); END;
CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit BEGIN SELECT RAISE(ABORT, 'rows of audit are never changed'); END;
CREATE INDEX ix_usage_key_id ON usage (key_id);
CREATE INDEX ix_usage_began ON usage (began);
CREATE INDEX ix_grants_key_id ON grants (key_id);
CREATE INDEX ix_api_keys_origin ON api_keys (origin);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('audit',4);
COMMIT;
